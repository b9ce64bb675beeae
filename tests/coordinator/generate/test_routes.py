"""Routes: one name for shares of several models, in every API, changed while the server runs."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from coordinator.generate.test_adapters_by_http import CALLS, CHAT, PADDING
from openai import AsyncOpenAI
from support.http_fakes import FakeDispatcher
from support.routed_server import Routed
from websockets.asyncio.client import connect

from splitserve.coordinator.errors import Headers
from splitserve.coordinator.generate.conversation import BEGINNING, prompt_key
from splitserve.coordinator.http.inner_call import InnerCall
from splitserve.coordinator.metrics.request_record import log_request
from splitserve.coordinator.tenants.buckets import Room, Shortage
from splitserve.coordinator.tenants.limits import ANONYMOUS

COMPLETIONS = "/v1/completions"
SIZES = pytest.mark.parametrize("more", [{}, PADDING], ids=["small", "large"])


async def ask(routed: Routed, path: str = COMPLETIONS, **more: Any) -> Any:
    answer = await routed.http.post(path, json={**CALLS[path], "model": "chat", **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


@SIZES
@pytest.mark.parametrize("path", CALLS)
async def test_the_answer_names_the_model_in_every_api(
    routed: Routed, path: str, more: dict[str, Any]
) -> None:
    assert (await ask(routed, path, **more))["model"] == "a"
    assert routed.write(shares={"a-1": 0, "b": 3}) == "chat: a 0, b 3"
    assert (await ask(routed, path, **more))["model"] == "b"
    assert routed.counts() == (1, 1)


@SIZES
async def test_a_conversation_stays_and_others_are_shared(routed: Routed, more: dict[str, Any]) -> None:
    """By each thing that marks a conversation; the reader's process decides as this one does."""
    routed.write(shares={"a": 1, "b": 1})
    system = {"role": "system", "content": "Be brief."}
    for mark in ("user", "prompt_cache_key", "message"):
        found = Counter[str]()
        for number in range(10 if more else 40):
            question = {"role": "user", "content": f"{number if mark == 'message' else 'Hi'}"}
            fields = {} if mark == "message" else {mark: f"u{number}"}
            first = await ask(routed, "/v1/chat/completions", messages=[system, question], **fields)
            later = [system, question, {"role": "assistant", "content": "Yes."}, question]
            more_words = {"role": "user", "content": "More."}
            second = await ask(
                routed, "/v1/chat/completions", messages=[*later, more_words], **fields, **more
            )
            assert first["model"] == second["model"]
            found[first["model"]] += 1
        assert min(found["a"], found["b"]) >= (1 if more else 10)
    models = set[str]()
    for number in range(20):
        body = {**CALLS[COMPLETIONS], "model": "chat"}
        answers = [
            (await routed.http.post(COMPLETIONS, json=body, headers={"x-session-id": f"s{number}"})).json()
            for body in (body, {**body, "prompt": "other words"})
        ]
        assert answers[0]["model"] == answers[1]["model"]
        models.add(answers[0]["model"])
    assert models == {"a", "b"}


def test_a_growing_prompt_keeps_its_key() -> None:
    for prompt, other in (("x" * BEGINNING, "y"), ([7] * BEGINNING, [8])):
        keys = [prompt_key([each]) for each in (prompt, prompt + other, other + prompt)]
        assert keys[0] == keys[1] != keys[2]


@SIZES
@pytest.mark.parametrize("lack", ["workers", "room"])
async def test_fallbacks_take_what_the_share_cannot(routed: Routed, lack: str, more: dict[str, Any]) -> None:
    routed.write(shares={"a": 1}, fallbacks=["b"])
    _lack(routed.a, lack)
    assert (await ask(routed, **more))["model"] == "b"
    _lack(routed.b, "room")
    refused = await routed.http.post(COMPLETIONS, json={**CALLS[COMPLETIONS], "model": "chat", **more})
    why = (
        "model 'chat' routes to 'a', which has no workers: No worker is connected."
        if lack == "workers"
        else "model 'chat' routes to 'a', whose queue is full: 9 requests are waiting already"
    )
    assert refused.status_code == (503 if lack == "workers" else 429)
    assert refused.json()["error"]["message"].startswith(why)
    assert refused.headers["retry-after"] == "1"
    assert routed.counts() == (0, 1)
    routed.a.workers, routed.a.is_full = True, False
    assert (await ask(routed, **more))["model"] == "a"


def _lack(dispatcher: FakeDispatcher, what: str) -> None:
    dispatcher.workers, dispatcher.is_full = what != "workers", what == "room"


async def test_a_model_that_is_lost_while_a_body_is_read(
    routed: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed.write(shares={"a": 1}, fallbacks=["b"])
    reader, seen = routed.server.app.generation.reader, list[str]()
    read = reader.read

    async def then_lost(*arguments: Any) -> Any:
        plan = await read(*arguments)
        seen.append(plan.model)
        routed.a.workers = False
        return plan

    monkeypatch.setattr(reader, "read", then_lost)
    assert (await ask(routed, **PADDING))["model"] == "b"
    assert seen == ["a", "b"]


async def test_a_model_that_is_named_itself_has_no_fallback(routed: Routed) -> None:
    routed.write(shares={"a": 1}, fallbacks=["b"])
    routed.a.workers = False
    refused = await routed.http.post(COMPLETIONS, json={**CALLS[COMPLETIONS], "model": "a"})
    assert (refused.status_code, routed.counts()) == (503, (0, 0))
    assert "routes" not in refused.text
    statuses = [status for _, status, _ in routed.server.app.servings.all[0].metrics.counts.requests]
    assert statuses == ["503"]


async def test_a_tenants_own_limit_has_no_fallback(routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    routed.write(shares={"a": 1}, fallbacks=["b"])
    limiter = routed.server.app.generation._tenancy.limiter
    shortage = Shortage("requests", 1, 1, 30.0, Room())
    monkeypatch.setattr(limiter, "admit", lambda account, tokens, answer: answer(shortage))
    refused = await routed.http.post(COMPLETIONS, json={**CALLS[COMPLETIONS], "model": "chat"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert routed.counts() == (0, 0)


class _Heard:
    def __init__(self) -> None:
        self.answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def answered(self, status: int, headers: Headers, body: bytes) -> None:
        self.answer.set_result((status, body))

    def started(self, headers: Headers) -> None: ...

    def streamed(self, data: bytes, *, last: bool) -> None: ...


async def test_requests_that_come_together_do_not_take_the_same_last_room(
    routed: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed.write(shares={"a": 1}, fallbacks=["b"])
    monkeypatch.setattr(routed.a, "full", lambda: "enough" if len(routed.a.requests) >= 2 else "")
    listeners = [_Heard() for _ in range(5)]
    for number, listener in enumerate(listeners):
        name = "chat" if number != 2 else "b"
        body = json.dumps({**CALLS[COMPLETIONS], "model": name}).encode()
        InnerCall(routed.server.app.generation, COMPLETIONS, body, ANONYMOUS, listener, {}).begin()
    answers = [await listener.answer for listener in listeners]
    assert [status for status, _ in answers] == [200] * 5
    assert [json.loads(body)["model"] for _, body in answers] == ["a", "a", "b", "b", "b"]


async def test_a_response_is_continued_by_the_model_that_answered(routed: Routed) -> None:
    async with AsyncOpenAI(base_url=f"{routed.http.base_url}/v1", api_key="none", max_retries=0) as client:
        for background in (False, True):
            routed.write(shares={"a": 0, "b": 1}, fallbacks=[])
            first = await client.responses.create(model="chat", input="Hi")
            routed.write(shares={"a": 1000, "b": 0.001})
            other = await client.responses.create(model="chat", input="Hi")
            more: Any = {"background": background, "truncation": "auto"}
            second = await client.responses.create(
                model="chat", input="More", previous_response_id=first.id, **more
            )
            while second.status in ("queued", "in_progress"):
                await asyncio.sleep(0.01)
                second = await client.responses.retrieve(second.id)
            assert [each.model for each in (first, other, second)] == ["b", "a", "b"]
            routed.write(shares={"a": 1, "b": 0})
            taken_back = await client.responses.create(
                model="chat", input="More", previous_response_id=first.id
            )
            assert taken_back.model == "a", "its share is 0"


async def test_other_pages_use_the_conversations_model(routed: Routed) -> None:
    routed.write(shares={"a": 0, "b": 1}, fallbacks=["a"])
    for path, body in {"/tokenize": {"prompt": "Hi"}, "/v1/tokenize": CHAT}.items():
        for more in ({}, PADDING):
            answer = await routed.http.post(path, json={"model": "chat", **body, **more})
            assert answer.json()["max_model_len"] == 300
    for path in ("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/detokenize"):
        bodies: Any = {"/detokenize": {"tokens": [7]}, "/v1/responses/input_tokens": {"input": "Hi"}}
        body = bodies.get(path, {"messages": CHAT["messages"]})
        answers = [
            (await routed.http.post(path, json={"model": name, **body})).json() for name in ("chat", "b")
        ]
        assert answers[0] == answers[1]
    raw = {"model": "chat", "prompt": "Hi", "raw": True, "stream": False}
    assert (await routed.http.post("/api/generate", json=raw)).json()["model"] == "b"
    embedded = (await routed.http.post("/v1/embeddings", json={"model": "chat", "input": "Hi"})).json()
    theirs = (await routed.http.post("/api/embed", json={"model": "chat:latest", "input": "Hi"})).json()
    assert (embedded["model"], theirs["model"]) == ("b", "b")
    assert routed.counts() == (0, 3)


async def test_lists_have_routes(routed: Routed) -> None:
    routed.write(shares={"a": 2, "b": 1})
    cards = {card["id"]: card for card in (await routed.http.get("/v1/models")).json()["data"]}
    assert set(cards) == {"a", "a-1", "b", "chat"}
    assert (cards["chat"]["root"], cards["chat"]["parent"]) == ("a", None)
    assert cards["chat"]["max_model_len"] == 300, "as long as all its models take"
    assert (await routed.http.get("/v1/models/chat")).json() == cards["chat"]
    for page in ("/api/tags", "/api/ps"):
        assert "chat" in {card["name"] for card in (await routed.http.get(page)).json()["models"]}
    routed.a.is_ready = False
    assert {card["name"] for card in (await routed.http.get("/api/ps")).json()["models"]} == {"b"}
    shown = (await routed.http.post("/api/show", json={"model": "chat"})).json()
    assert shown["model_info"]["general.basename"] == "a"
    unknown = await routed.http.post(COMPLETIONS, json={**CALLS[COMPLETIONS], "model": "none"})
    assert "'chat'" in unknown.json()["error"]["message"]


async def test_counts_and_log_lines_have_the_model(routed: Routed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for one in routed.server.app.servings.all:
        one.metrics.listeners.add("request log", log_request)
    await ask(routed)
    routed.write(shares={"b": 1})
    for body in ({}, {}, {"model": "b"}):
        await ask(routed, **body)
    text = (await routed.http.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("splitserve_route_requests_total")]
    assert lines == [
        'splitserve_route_requests_total{model_name="a",route="chat"} 1.0',
        'splitserve_route_requests_total{model_name="b",route="chat"} 2.0',
    ]
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    assert [each["model"] for each in fields if "endpoint" in each] == ["a", "b", "b", "b"]


async def test_a_websocket_and_a_batch_take_the_name(routed: Routed) -> None:
    routed.write(shares={"b": 1})
    async with connect(f"ws://127.0.0.1:{routed.server.port}/v1/stream", proxy=None) as socket:
        await socket.send(json.dumps({"id": "x", "body": {**CHAT, "model": "chat"}}))
        assert json.loads(await socket.recv())["event"]["model"] == "b"
    line = {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions"}
    content = json.dumps({**line, "body": {**CHAT, "model": "chat"}}).encode()
    async with AsyncOpenAI(base_url=f"{routed.http.base_url}/v1", api_key="none", max_retries=0) as client:
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch: Any = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
        output = json.loads((await client.files.content(batch.output_file_id)).text)
    assert output["response"]["body"]["model"] == "b"


async def test_a_route_is_ready_while_one_of_its_models_is(routed: Routed) -> None:
    routed.write(shares={"a": 1, "b": 0}, fallbacks=["b"])
    for a, b, status in ((True, False, 200), (False, True, 200), (False, False, 503)):
        routed.a.is_ready, routed.b.is_ready = a, b
        assert (await routed.http.get("/ready?model=chat")).status_code == status
    routed.write(shares={"a": 1, "b": 0})
    routed.b.is_ready = True
    assert (await routed.http.get("/ready?model=chat")).status_code == 503, "it never chooses b"
