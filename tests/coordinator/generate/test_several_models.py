"""One coordinator with two models: requests, pages and counts are of the one that they name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from coordinator.conftest import ADMIN_KEY
from coordinator.generate.test_adapters_by_http import CALLS, CHAT, OTHER_PAGES, PADDING
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from support.http_fakes import FakeDispatcher
from websockets.asyncio.client import connect

from splitserve.cli.settings import DEMO_MODEL
from splitserve.coordinator.dialects.responses_store import SqliteResponses
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.lifecycle.adapters import AdapterNames
from splitserve.coordinator.metrics.request_record import log_request
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.serving import Served
from splitserve.coordinator.settings import CoordinatorSettings, OtherModel
from splitserve.coordinator.text.served_model import ServedModel

TEXT = "def area(radius): return"


@pytest.fixture
def other() -> ServedModel:
    adapters = AdapterNames({"sql": "A"})
    loaded = ServedModel.load(DEMO_MODEL, "demo", ["gpt-5"], max_model_len=300)
    return replace(loaded, adapters=lambda: adapters)


@pytest.fixture
def others_dispatcher(other: ServedModel) -> FakeDispatcher:
    ids = other.tokenizer.fast.encode("other words", add_special_tokens=False).ids
    return FakeDispatcher(lambda request: ids)


@pytest.fixture
async def server(
    dispatcher: FakeDispatcher,
    model: ServedModel,
    other: ServedModel,
    others_dispatcher: FakeDispatcher,
    limits: HttpLimits,
    tmp_path: Path,
) -> AsyncIterator[HttpServer]:
    parts = AppParts(
        limits,
        dispatcher.system,
        Operators(ADMIN_KEY),
        ollama=True,
        responses=SqliteResponses(tmp_path / "responses.sqlite", keep_s=3600),
        further=[Served(other, others_dispatcher, others_dispatcher.system)],
    )
    server = HttpServer(HttpApp(dispatcher, model, parts))
    await server.start()
    yield server
    await server.stop(grace_s=0)
    assert not dispatcher.running
    assert not others_dispatcher.running
    assert [one.metrics.num_open for one in server.app.servings.all] == [0, 0]


@pytest.mark.parametrize("more", [{}, PADDING], ids=["small", "large"])
@pytest.mark.parametrize("path", CALLS)
async def test_a_request_goes_to_the_workers_of_its_model(
    http: httpx.AsyncClient,
    dispatcher: FakeDispatcher,
    other: ServedModel,
    others_dispatcher: FakeDispatcher,
    path: str,
    more: dict[str, Any],
) -> None:
    names = {"demo": "demo", "gpt-5": "demo", "sql": "sql", "tiny": "tiny"}
    for name, shown in names.items():
        answer = await http.post(path, json={**CALLS[path], "model": name, **more})
        assert (answer.status_code, answer.json()["model"]) == (200, name if "api" in path else shown)
        assert ("other words" in answer.text) == (name != "tiny")
    assert [each.adapter for each in others_dispatcher.requests] == ["", "", "A"]
    (request,) = dispatcher.requests
    (theirs, *_) = others_dispatcher.requests
    assert list(theirs.prompt_token_ids) != list(request.prompt_token_ids), "each has its own tokenizer"
    unknown = await http.post(path, json={**CALLS[path], "model": "none", **more})
    assert unknown.status_code == 404
    assert all(name in unknown.text for name in names)


async def test_a_request_that_names_none_means_the_first(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, others_dispatcher: FakeDispatcher
) -> None:
    assert (await http.post("/v1/completions", json={"prompt": TEXT})).json()["model"] == "tiny"
    assert (len(dispatcher.requests), len(others_dispatcher.requests)) == (1, 0)


@pytest.mark.parametrize("path", OTHER_PAGES)
async def test_pages_that_take_a_name_use_its_model(http: httpx.AsyncClient, path: str) -> None:
    body = {**OTHER_PAGES[path], **({"prompt": TEXT} if path == "/tokenize" else {})}
    answers = [(await http.post(path, json={**body, "model": name})).json() for name in ("tiny", "demo")]
    assert answers[0] != answers[1]
    large = {} if path == "/api/show" else PADDING
    assert (await http.post(path, json={**body, "model": "demo", **large})).json() == answers[1]


async def test_without_workers_of_one_model_the_other_is_served(
    http: httpx.AsyncClient, others_dispatcher: FakeDispatcher
) -> None:
    others_dispatcher.workers = others_dispatcher.is_ready = False
    for more in ({}, PADDING):
        refused = await http.post("/v1/completions", json={"prompt": TEXT, "model": "demo", **more})
        assert refused.status_code == 503
        served = await http.post("/v1/completions", json={"prompt": TEXT, "model": "tiny", **more})
        assert served.status_code == 200
    assert (await http.get("/ready")).status_code == 200
    assert (await http.get("/ready?model=tiny")).status_code == 200
    assert (await http.get("/ready?model=demo")).status_code == 503
    assert (await http.get("/ready?model=none")).status_code == 404
    health = (await http.get("/health")).json()["checks"]["serving"]
    assert health["status"] == "degraded"
    assert health["reason"].startswith("demo: ")
    loaded = (await http.get("/api/ps")).json()["models"]
    assert [card["name"] for card in loaded] == ["tiny", "tiny-1", "gpt-4o"]


async def test_counts_are_each_models_own(http: httpx.AsyncClient, others_dispatcher: FakeDispatcher) -> None:
    others_dispatcher.refuse = lambda request: None
    for name, count in (("tiny", 1), ("demo", 2)):
        for _ in range(count):
            await http.post("/v1/completions", json={"prompt": TEXT, "model": name, "max_tokens": 1})
    text = (await http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# TYPE splitserve_generation_tokens_total") == 1
    found = {s.labels["model_name"]: s.value for s in families["splitserve_generation_tokens"].samples}
    assert found == {"tiny": 1, "demo": 2}
    workers = [s.labels for s in families["splitserve_workers"].samples]
    assert {labels["model_name"] for labels in workers} == {"tiny", "demo"}
    for name in ("splitserve_overload_limit", "splitserve_listener_failures"):
        assert families[name].samples
        assert all("model_name" not in sample.labels for sample in families[name].samples)


@pytest.mark.parametrize("more", [{}, PADDING], ids=["small", "large"])
async def test_refusals_are_counted_for_their_model(
    http: httpx.AsyncClient, server: HttpServer, others_dispatcher: FakeDispatcher, more: dict[str, Any]
) -> None:
    first, other = server.app.servings.all
    body = {"prompt": TEXT, "max_tokens": 9, "model": "gpt-5", **more}
    if not more:  # of a large one that cannot be planned no model is known here
        assert (await http.post("/v1/completions", json={**body, "max_tokens": 300})).status_code == 400
    others_dispatcher.workers = False
    assert (await http.post("/v1/completions", json=body)).status_code == 503
    assert (await http.post("/v1/completions", json={**body, "model": "none"})).status_code == 404
    statuses = [sorted(status for _, status, _ in one.metrics.counts.requests) for one in (first, other)]
    assert statuses == [["404"], ["503"] if more else ["400", "503"]]


@pytest.mark.parametrize("path", CALLS)
async def test_a_name_that_is_unknown_is_counted_in_every_api(
    http: httpx.AsyncClient, server: HttpServer, path: str
) -> None:
    assert (await http.post(path, json={**CALLS[path], "model": "none"})).status_code == 404
    (counted,) = server.app.metrics.counts.requests.items()
    assert (counted[0][1], counted[1]) == ("404", 1)


async def test_log_lines_name_the_model(
    http: httpx.AsyncClient, server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for one in server.app.servings.all:
        one.metrics.listeners.add("request log", log_request)
    for name in ("sql", "tiny", "gpt-5"):
        await http.post("/v1/completions", json={"prompt": TEXT, "model": name})
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    assert [each["model"] for each in fields if "endpoint" in each] == ["sql", "tiny", "demo"]


async def test_operators_pages_are_about_one_model(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, others_dispatcher: FakeDispatcher
) -> None:
    state = (await http.get("/debug/state")).json()
    assert list(state["models"]) == ["demo"]
    alone = (await http.get("/debug/state?model=demo")).json()
    assert alone["workers"] == state["models"]["demo"]["workers"]
    assert "models" not in alone
    await http.post("/v1/completions", json={"prompt": TEXT, "model": "demo"})
    feeds = [(await http.get(f"/dashboard/feed?model={name}")).json() for name in ("tiny", "demo")]
    assert [feed["model"] for feed in feeds] == ["tiny", "demo"]
    assert [feed["num_requests"] for feed in feeds] == [0, 1]
    assert feeds[0]["models"] == feeds[1]["models"] == ["tiny", "demo"]
    for query, drained in (("", dispatcher), ("?model=demo", others_dispatcher)):
        assert (await http.post(f"/admin/drain/prefill-0{query}")).status_code == 202
        assert [name for name, _ in drained.drained] == ["prefill-0"]
    assert (await http.post("/admin/drain/prefill-0?model=gpt-5")).status_code == 202, "by any of its names"
    assert (await http.post("/admin/drain/prefill-0?model=none")).status_code == 404
    unknown = (await http.post("/admin/drain/none")).json()["error"]["message"]
    assert unknown.count("prefill-0") == 2, "one of each model"
    for page in ("/props", "/server_info", "/tokenizer_info"):
        one, two = [(await http.get(f"{page}?model={name}")).json() for name in ("tiny", "demo")]
        assert one != two


async def test_lists_have_all_names(http: httpx.AsyncClient) -> None:
    cards = (await http.get("/v1/models")).json()["data"]
    roots = {card["id"]: card["root"] for card in cards}
    assert roots == {
        "tiny": "tiny", "tiny-1": "tiny", "gpt-4o": "tiny", "demo": "demo", "gpt-5": "demo", "sql": "sql",
    }  # fmt: skip
    assert {card["id"]: card["max_model_len"] for card in cards}["gpt-5"] == 300
    assert (await http.get("/v1/models/gpt-5")).json()["root"] == "demo"


async def test_a_websocket_takes_requests_for_both(server: HttpServer) -> None:
    async with connect(f"ws://127.0.0.1:{server.port}/v1/stream", proxy=None) as socket:
        for name in ("demo", "tiny"):
            await socket.send(json.dumps({"id": name, "body": {**CHAT, "model": name}}))
        seen = set[tuple[str, str]]()
        while len(seen) < 2:
            message = json.loads(await socket.recv())
            seen.add((message["id"], message["event"]["model"]))
    assert seen == {("demo", "demo"), ("tiny", "tiny")}


@pytest.mark.parametrize(
    ("others", "more", "message"),
    [
        ([{"served_model_name": "a"}], {}, "two models have the name 'a'"),
        ([{"served_model_name": "b,c"}, {"served_model_name": "c"}], {}, "two models have the name 'c'"),
        ([{"served_model_name": "b", "control_address": "tcp://127.0.0.1:7700"}], {}, "control_address of b"),
        ([{"served_model_name": "b"}], {"processes": 2}, "--processes 2 needs a port"),
        ([{}], {}, "served_model_name"),
        ([{"served_model_name": "org/x"}], {"model": "org/x", "served_model_name": ""}, "the name 'org/x'"),
        ([{"served_model_name": "b", "port": 1}], {}, "port"),
    ],
)
def test_what_cannot_be_served_together(others: Any, more: dict[str, Any], message: str) -> None:
    models = [{"model": DEMO_MODEL, **other} for other in others]
    first: Any = {"model": DEMO_MODEL, "served_model_name": "a", "insecure": True}
    with pytest.raises(ValidationError, match=message):
        CoordinatorSettings(**{**first, "other_models": models, **more})


def test_each_model_has_settings_of_its_own(tmp_path: Path) -> None:
    other = OtherModel(model=tmp_path, served_model_name="org/b", control_address="tcp://127.0.0.1:7710")
    settings = CoordinatorSettings(
        model=DEMO_MODEL, insecure=True, max_queue=7, trace_folder=tmp_path, other_models=(other,)
    )
    first, second = settings.each_model()
    assert first is settings
    assert (second.model, second.model_name, second.control_address) == (
        tmp_path,
        "org/b",
        other.control_address,
    )
    assert (second.max_queue, second.trace_folder) == (7, tmp_path / "org_b")
