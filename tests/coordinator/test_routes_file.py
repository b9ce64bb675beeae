"""The file of routes: what is wrong in it, and how a running server follows it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from support.http_fakes import FakeDispatcher, sentencepiece_tokenizer
from support.routed_server import Routed, routed_server, write_routes

from splitserve.coordinator import routes_file
from splitserve.coordinator.errors import CannotStart
from splitserve.coordinator.images.rules import NoImages
from splitserve.coordinator.routes_file import RoutesFile
from splitserve.coordinator.text.embeddings import EmbeddingRules
from splitserve.coordinator.text.model_route import ModelRoute
from splitserve.coordinator.text.served_model import ServedModel, ServedModels
from splitserve.coordinator.text.tokenizer import Tokenizer

GOOD = "routes: [{name: chat, shares: {tiny-1: 95}}]"
WRONG = {
    "": "must hold `routes:`",
    "routes": "must hold `routes:`",
    "routes: [": "line 1: ",
    "[" * 5000: "it is too deep",
    "routes: !!bool x": "a value is not of its !!type",
    "routes: !!timestamp x": "a value is not of its !!type",
    "routes: []\nroutes: []": "line 2: 'routes' stands twice",
    "route: []": "routes: Field required",
    "routes: []\nmore: 1": "more: Extra inputs",
    "routes: [{name: chat}]": "routes.0.shares: Field required",
    "routes: [{name: '', shares: {tiny: 1}}]": "routes.0.name: ",
    "routes: [{name: chat, shares: {}}]": "routes.0.shares: ",
    "routes: [{name: chat, shares: {tiny: 0}}]": "one must be above 0",
    "routes: [{name: chat, shares: {tiny: -1}}]": "routes.0.shares.tiny: Input should be greater",
    "routes: [{name: chat, shares: {tiny: .nan}}]": "routes.0.shares.tiny: Input should be a finite number",
    "routes: [{name: chat, shares: {tiny: '5'}}]": "routes.0.shares.tiny: Input should be a valid number",
    "routes: [{name: chat, shares: {tiny: true}}]": "routes.0.shares.tiny: Input should be a valid number",
    "routes: [{name: chat, shares: {tiny: 1, tiny: 2}}]": "line 1: 'tiny' stands twice",
    "routes: [{name: chat, shares: {tiny: 1, tiny-1: 2}}]": "two shares of the model 'tiny'",
    "routes: [{name: chat, shares: {tiny: 1}, weight: 3}]": "routes.0.weight: Extra inputs",
    "routes: [{name: chat, shares: {none: 1}}]": "'none', which is no model here .*there are: tiny, tiny-1",
    "routes: [{name: chat, shares: {tiny: 1}, fallbacks: [none]}]": "'none', which is no model here",
    "routes: [{name: chat, shares: {tiny: 1}, fallbacks: tiny}]": "routes.0.fallbacks: ",
    "routes: [{name: chat, shares: {tiny: 1}, shadow: none, shadow_percent: 1}]": "'none', which is no model",
    "routes: [{name: chat, shares: {tiny: 1}, shadow: tiny}]": "`shadow` and `shadow_percent` together",
    "routes: [{name: chat, shares: {tiny: 1}, shadow_percent: 1}]": "`shadow` and `shadow_percent` together",
    "routes: [{name: chat, shares: {tiny: 1}, shadow: tiny, shadow_percent: 101}]": "less than or equal",
    "routes: [{name: tiny-1, shares: {tiny: 1}}]": "'tiny-1' has the name of a model",
    f"{GOOD[:-1]}, {{name: chat, shares: {{tiny: 1}}}}]": "two routes have the name 'chat'",
    f"{GOOD[:-1]}, {{name: other, shares: {{chat: 1}}}}]": "'chat', which is no model here",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_file_that_is_no_good(text: str, model: ServedModel, tmp_path: Path) -> None:
    """At the start it is an error with a sentence; later what is in force stays."""
    models, path = ServedModels([model]), tmp_path / "routes.yaml"
    path.write_text(text)
    with pytest.raises(CannotStart, match=f"--routes-file: .*routes.yaml: .*{WRONG[text]}"):
        RoutesFile(path, models)
    path.write_text(GOOD)
    file = RoutesFile(path, models)
    assert models.routes == {"chat": ModelRoute("chat", {"tiny": 95})}
    path.write_text(text)
    for _ in range(2):
        with pytest.raises(ValueError, match=WRONG[text]):
            file.refresh()
        assert list(models.routes) == ["chat"]
    path.write_text(GOOD + "  # as before")
    assert file.refresh() == "", "the same routes"


def test_a_file_is_read_when_it_has_changed(
    model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "routes.yaml"
    path.write_text(GOOD)
    file, num_read = RoutesFile(path, ServedModels([model])), 0

    def read(*_: object) -> dict[str, ModelRoute]:
        nonlocal num_read
        num_read += 1
        return {}

    monkeypatch.setattr(routes_file, "routes_of", read)
    assert (file.refresh(), num_read) == ("", 0)
    path.write_text("routes: []")
    assert (file.refresh(), file.refresh(), num_read) == ("none", "", 1)


def test_a_file_that_is_not_there_or_not_text(model: ServedModel, tmp_path: Path) -> None:
    path = tmp_path / "routes.yaml"
    with pytest.raises(CannotStart, match=r"No such file.*routes\.yaml"):
        RoutesFile(path, ServedModels([model]))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CannotStart, match=r"routes\.yaml: .*utf-8"):
        RoutesFile(path, ServedModels([model]))


async def test_a_server_follows_its_file(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with routed_server(tmp_path, dispatcher, model) as routed:
        write_routes(routed.file, {"shares": {"a": 95, "b": 5}})
        await _until(routed, "chat: a 95, b 5")
        routed.file.write_text("routes: [{name: chat, shares: {a: 1, c: 9}}]")
        async with asyncio.timeout(30):
            while "still going by the old routes file" not in caplog.text:
                await asyncio.sleep(0.05)
        assert "names 'c', which is no model here" in caplog.text
        assert str(routed.server.app.servings.models.routes["chat"]) == "chat: a 95, b 5"
        write_routes(routed.file)
        await _until(routed)


async def _until(routed: Routed, *expected: str) -> None:
    async with asyncio.timeout(30):
        while [str(route) for route in routed.server.app.servings.models.routes.values()] != [*expected]:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("unlike", "why"),
    [
        ({"chat_template": None}, "another chat template"),
        ({"embeddings": EmbeddingRules(alone=True)}, "no head"),
        ({"images": NoImages("for want of weights")}, "other rules for images"),
        ({"tokenizer": Tokenizer(sentencepiece_tokenizer())}, "another tokenizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_shadow_takes_the_same_tokens(
    unlike: dict[str, object], why: str, model: ServedModel, tmp_path: Path
) -> None:
    path, other = tmp_path / "routes.yaml", replace(model, name="b", aliases=())
    path.write_text("routes: [{name: chat, shares: {tiny: 1}, shadow: b, shadow_percent: 5}]")
    RoutesFile(path, ServedModels([model, other]))
    with pytest.raises(CannotStart, match=f"shadow 'b', which gets the tokens of 'tiny' but has {why}"):
        RoutesFile(path, ServedModels([model, replace(other, **unlike)]))
