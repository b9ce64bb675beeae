"""An adapter is a model by its own name, in every dialect; its answers have this name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families
from support.adapted_bench import Adapted
from support.batch_server import serving
from support.http_fakes import ADMIN_KEY, FakeDispatcher
from websockets.asyncio.client import connect

from splitserve.coordinator import main
from splitserve.coordinator.dialects.responses_store import SqliteResponses
from splitserve.coordinator.errors import NotFound
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.http.limits import LARGE_BODY_BYTES, HttpLimits
from splitserve.coordinator.lifecycle.adapters import AdapterNames
from splitserve.coordinator.lifecycle.request import Ended
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.settings import CoordinatorSettings
from splitserve.coordinator.tenants.tenancy import Tenancy
from splitserve.coordinator.tenants.usage_record import UsageRecord
from splitserve.coordinator.text.served_model import ServedModel, ServedModels

CHAT: Any = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
CALLS: Any = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi", "temperature": 0},
    "/invocations": CHAT,
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 9},
    "/api/chat": {**CHAT, "temperature": None, "stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
}
OTHER_PAGES: Any = {
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [7]},
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/api/show": {},
}
PADDING = {"metadata": None, "x": "y" * LARGE_BODY_BYTES}


@dataclass
class Known:
    """What the workers have; tests change it."""

    names: AdapterNames = field(default_factory=lambda: AdapterNames({"sql": "A"}, {"away": "B"}))

    def __call__(self) -> AdapterNames:
        return self.names


@dataclass
class Booked:
    """A meter that keeps its records."""

    records: list[UsageRecord] = field(default_factory=list)

    def began(self, record: UsageRecord) -> None:
        pass

    def ended(self, record: UsageRecord) -> None:
        self.records.append(record)


@pytest.fixture
def known() -> Known:
    return Known()


@pytest.fixture
def adapted(model: ServedModel, known: Known) -> ServedModel:
    return replace(model, adapters=known)


@pytest.fixture
def meter() -> Booked:
    return Booked()


@pytest.fixture
async def server(
    dispatcher: FakeDispatcher, adapted: ServedModel, limits: HttpLimits, meter: Booked, tmp_path: Path
) -> AsyncIterator[HttpServer]:
    tenancy: Any = replace(Tenancy(), meter=meter)
    parts = AppParts(
        limits,
        dispatcher.system,
        Operators(ADMIN_KEY),
        tenancy,
        ollama=True,
        responses=SqliteResponses(tmp_path / "responses.sqlite", keep_s=3600),
    )
    server = HttpServer(HttpApp(dispatcher, adapted, parts))
    await server.start()
    yield server
    await server.stop(grace_s=0)
    assert not dispatcher.running


@pytest.mark.parametrize("more", [{}, PADDING], ids=["small", "large"])
@pytest.mark.parametrize("path", CALLS)
async def test_an_adapter_answers_by_its_own_name(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str, more: dict[str, Any]
) -> None:
    answer = await http.post(path, json={**CALLS[path], "model": "sql", **more})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "sql"
    (request,) = dispatcher.requests
    assert (request.adapter, request.adapter_name) == ("A", "sql")


@pytest.mark.parametrize("path", CALLS)
async def test_the_models_own_names_and_no_name_mean_no_adapter(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str
) -> None:
    named = [{"model": "tiny"}, {"model": "gpt-4o"}, *([] if path.startswith("/api/") else [{}])]
    for asked in named:
        answer = (await http.post(path, json={**CALLS[path], **asked})).json()
        assert answer["model"] == (
            "gpt-4o" if path.startswith("/api/") and "gpt-4o" in asked.values() else "tiny"
        )
    assert {request.adapter for request in dispatcher.requests} == {""}
    assert len(dispatcher.requests) == len(named)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_streams_parts_have_the_name(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, json={**CALLS[path], "model": "sql", "stream": True})
    parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    holders = [part.get("response") or part.get("message") or part for part in parts]
    assert {holder["model"] for holder in holders if "model" in holder} == {"sql"}


async def test_by_websocket_too(server: HttpServer, dispatcher: FakeDispatcher) -> None:
    async with connect(f"ws://127.0.0.1:{server.port}/v1/stream", proxy=None) as socket:
        await socket.send(json.dumps({"id": "a", "body": {**CHAT, "model": "sql"}}))
        assert json.loads(await socket.recv())["event"]["model"] == "sql"
    assert dispatcher.requests[0].adapter == "A"


async def test_in_a_batch_too(dispatcher: FakeDispatcher, adapted: ServedModel, tmp_path: Path) -> None:
    lines = [
        {"custom_id": path, "method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "model": path}}
        for path in ("sql", "tiny", "none")
    ]
    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    async with serving(dispatcher, adapted, tmp_path / "batches.db") as client:
        given = await client.files.create(file=("lines.jsonl", body), purpose="batch")
        batch = await client.batches.create(
            input_file_id=given.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        async with asyncio.timeout(60):
            while batch.status != "completed":
                batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        rows = (await client.files.content(batch.output_file_id)).text.splitlines()
    answered = {row["custom_id"]: row["response"]["body"]["model"] for row in map(json.loads, rows)}
    assert answered == {"sql": "sql", "tiny": "tiny"}


@pytest.mark.parametrize("path", OTHER_PAGES)
async def test_pages_that_take_a_models_name_take_an_adapters(http: httpx.AsyncClient, path: str) -> None:
    body, large = OTHER_PAGES[path], PADDING if path != "/api/show" else {}
    for more in ({}, large):
        assert (await http.post(path, json={**body, "model": "sql", **more})).status_code == 200
        assert (await http.post(path, json={**body, "model": "none", **more})).status_code == 404


async def test_lists_have_the_adapters_that_are_served(client: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    cards = {card.id: card.model_dump() for card in (await client.models.list()).data}
    assert list(cards) == ["tiny", "tiny-1", "gpt-4o", "sql"]
    assert [(card["root"], card["parent"]) for card in cards.values()] == [
        ("tiny", None),
        ("tiny", None),
        ("tiny", None),
        ("sql", "tiny"),
    ]
    assert (await client.models.retrieve("sql")).model_dump() == cards["sql"]
    tags = {card["name"]: card for card in (await http.get("/api/tags")).json()["models"]}
    assert {name: card["details"]["parent_model"] for name, card in tags.items()} == {
        "tiny": "",
        "tiny-1": "",
        "gpt-4o": "",
        "sql": "tiny",
    }
    assert tags["sql"]["digest"] != tags["tiny"]["digest"]
    shown = (await http.post("/api/show", json={"model": "sql:latest"})).json()
    assert shown["details"]["parent_model"] == "tiny"


async def test_an_unknown_models_error_names_what_there_is(http: httpx.AsyncClient, known: Known) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "Hi", "model": "none"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert answer.json()["error"]["message"].endswith("has 'tiny', 'tiny-1', 'gpt-4o', 'sql'.")
    known.names = AdapterNames({f"a{n:03}": "A" for n in range(100)})
    answer = await http.post("/v1/completions", json={"prompt": "Hi", "model": "none"})
    assert answer.json()["error"]["message"].endswith("'a012' and 87 more (GET /v1/models).")


@pytest.mark.parametrize("more", [{}, PADDING], ids=["small", "large"])
async def test_a_name_that_may_yet_be_an_adapters_is_not_unknown(
    http: httpx.AsyncClient, known: Known, more: dict[str, Any]
) -> None:
    """A coordinator that has just started learns its adapters from the workers: clients are to come again."""
    known.names = AdapterNames(complete=False)
    answer = await http.post("/v1/completions", json={"prompt": "Hi", "model": "sql", **more})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert (await http.post("/v1/completions", json={"prompt": "Hi", "model": "tiny"})).status_code == 200


async def test_an_adapter_whose_workers_are_away_is_the_lifecycles_to_refuse(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    dispatcher.refuse = lambda request: (
        Ended(error="unavailable", message="away") if request.adapter else None
    )
    answer = await http.post("/v1/completions", json={"prompt": "Hi", "model": "away"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "away")
    assert dispatcher.requests[0].adapter == "B"


async def test_usage_and_metrics_name_the_adapter(http: httpx.AsyncClient, meter: Booked) -> None:
    for name in ("sql", "sql", "gpt-4o", "none"):
        await http.post("/v1/completions", json={"prompt": "Hi", "model": name})
    assert [record.model for record in meter.records] == ["sql", "sql", "tiny"]
    text = (await http.get("/metrics")).text
    counts = {
        (sample.labels["model_name"], sample.labels["status"]): sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "splitserve_requests"
        for sample in family.samples
    }
    assert counts == {("sql", "200"): 2, ("tiny", "200"): 1, ("tiny", "404"): 1}


async def test_fields_of_other_servers_say_where_an_adapter_is_named(http: httpx.AsyncClient) -> None:
    for name, value in (("lora_path", "sql"), ("lora", [{"id": 0, "scale": 1}]), ("adapter_id", "sql")):
        answer = await http.post("/v1/completions", json={"prompt": "Hi", name: value})
        assert answer.status_code == 400
        assert "name the adapter in `model`" in answer.json()["error"]["message"]


async def test_an_answer_with_a_key_is_resumed_only_from_the_same_content(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, known: Known
) -> None:
    async def answer_id(model: str) -> bytes:
        body = {"prompt": "Hi", "model": model, "seed": 1}
        assert (await http.post("/v1/completions", json=body, headers={"idempotency-key": "k"})).is_success
        return dispatcher.requests[-1].answer_id

    ids = [await answer_id("tiny"), await answer_id("sql"), await answer_id("sql")]
    known.names = AdapterNames({"sql": "C"})
    ids.append(await answer_id("sql"))
    assert ids[1] == ids[2]
    assert len(set(ids)) == 3


def test_a_coordinator_learns_adapters_from_its_workers_alone(model_folder: Path) -> None:
    bench = Adapted()
    settings = CoordinatorSettings(model=model_folder, served_model_name="first,second", insecure=True)
    model = main._model_of(settings, bench.core, frozenset(settings.names))
    for name in ("p", "d"):
        bench.report(name, "sql:A", "first:B", "second:C")
    assert model.listed() == ["first", "second", "sql"]
    assert (model.adapter("sql"), model.adapter(model.shown_name("second"))) == ("A", "")


async def test_a_name_that_is_gone_between_reading_and_opening_is_unknown(
    adapted: ServedModel, known: Known
) -> None:
    models = ServedModels([adapted])
    assert models.of("sql") is adapted
    known.names = AdapterNames()
    with pytest.raises(NotFound):
        models.of("sql")
