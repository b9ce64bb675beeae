"""Responses stored in Redis: each of two coordinators uses what the other has stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from redis.asyncio import Redis
from support.http_fakes import ADMIN_KEY, ANSWER, FakeDispatcher

from splitserve.coordinator.dialects import redis_responses
from splitserve.coordinator.dialects.redis_responses import PREFIX, RedisResponses
from splitserve.coordinator.dialects.responses_body import ResponsesRequest
from splitserve.coordinator.dialects.responses_events import ResponseAnswer
from splitserve.coordinator.errors import CannotStart, NotFound, Unavailable
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel

ASKED: Any = {"model": "tiny", "input": "Hi!", "temperature": 0}
KEEP_S = 1000
Two = tuple[AsyncOpenAI, AsyncOpenAI]


@pytest.fixture
async def two(
    redis_server: str,
    dispatcher: FakeDispatcher,
    model: ServedModel,
    limits: HttpLimits,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Two]:
    """Clients of two coordinators."""
    monkeypatch.setattr(redis_responses, "TIMEOUT_S", 60.0)  # a machine may stand still
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(2):
            store = RedisResponses(redis_server, KEEP_S)
            app = HttpApp(
                dispatcher, model, AppParts(limits, dispatcher.system, Operators(ADMIN_KEY), responses=store)
            )
            server = HttpServer(app)
            await server.start()
            stack.push_async_callback(server.stop, grace_s=0)
            plain = httpx.AsyncClient(verify=False, timeout=60)
            url = f"http://127.0.0.1:{server.port}/v1"
            client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=plain)
            clients.append(await stack.enter_async_context(client))
        yield clients[0], clients[1]


async def status_of(client: AsyncOpenAI, id: str, *awaited: str) -> str:
    async with asyncio.timeout(60):
        while (status := str((await client.responses.retrieve(id)).status)) not in awaited:
            await asyncio.sleep(0.01)
    return status


async def test_what_one_has_stored_the_other_reads_continues_lists_and_deletes(
    two: Two, redis_server: str, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    one, other = two
    first = await one.responses.create(**ASKED)
    assert (await other.responses.retrieve(first.id)).output_text == ANSWER
    assert [item.type async for item in other.responses.input_items.list(first.id)] == ["message"]
    second = await other.responses.create(**{**ASKED, "input": "So?"}, previous_response_id=first.id)
    prompt = model.tokenizer.fast.decode(dispatcher.requests[-1].prompt_token_ids)
    assert [text in prompt for text in ("Hi!", ANSWER, "So?")] == [True] * 3
    named: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "So?"}]
    await other.responses.create(**{**ASKED, "input": named}, store=False)
    listed = await other.get("/responses?limit=1", cast_to=dict[str, Any])
    assert ([one["id"] for one in listed["data"]], listed["has_more"]) == ([second.id], True)
    listed = await other.get(f"/responses?after={second.id}", cast_to=dict[str, Any])
    assert ([one["id"] for one in listed["data"]], listed["has_more"]) == ([first.id], False)
    async with Redis.from_url(redis_server) as redis:
        ages = [await redis.ttl(key) for key in await redis.keys("*")]
        assert ages
        assert all(0 < age <= KEEP_S for age in ages)
        for id in (first.id, second.id):
            await other.responses.delete(id)
            with pytest.raises(openai.NotFoundError):
                await one.responses.retrieve(id)
        assert not await redis.keys(f"{PREFIX}[!o]*")
        assert not await redis.keys(f"{PREFIX}one:*")
    for path in ("of:", "../of:", "x:y"):
        with pytest.raises(openai.NotFoundError):
            await one.responses.retrieve(path)


async def test_what_runs_on_one_is_seen_streamed_and_cancelled_on_the_other(
    two: Two, dispatcher: FakeDispatcher
) -> None:
    one, other = two
    dispatcher.hold = True
    queued = await one.responses.create(background=True, **ASKED)
    assert await status_of(other, queued.id, "queued", "in_progress")
    dispatcher.hold = False
    stream = await other.responses.retrieve(queued.id, stream=True, starting_after=2)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(3, 3 + len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert (await other.responses.retrieve(queued.id)).output_text == ANSWER
    dispatcher.step_s = 0.01
    running = await one.responses.create(background=True, **ASKED)
    await status_of(other, running.id, "in_progress")
    assert (await other.responses.cancel(running.id)).status == "cancelled"
    async with asyncio.timeout(60):
        while dispatcher.running:
            await asyncio.sleep(0.01)
    assert dispatcher.cancelled
    assert (await one.responses.retrieve(running.id)).status == "cancelled"


async def test_a_tenant_sees_its_own_alone_and_what_was_left_behind_has_failed(redis_server: str) -> None:
    store = RedisResponses(redis_server, KEEP_S)
    asked = ResponsesRequest.model_validate({"input": "Hi!", "background": True})
    item = {"id": "msg_1", "type": "message", "role": "user", "content": "Hi!"}
    left = {**ResponseAnswer("resp_left", asked, "tiny").response, "status": "queued"}
    done = {**ResponseAnswer("resp_done", asked, "tiny").response, "status": "completed"}
    await store.save("a", left, [item], deadline=1.0)
    await store.save("a", done, [item])
    assert (await store.found("a", "resp_left")).response["status"] == "failed"
    assert set(await store.items("a", ["msg_1", "msg_2"])) == {"msg_1"}
    assert not await store.items("b", ["msg_1"])
    assert await store.newest("b", None, 10) == ([], False)
    for work in (store.found, store.conversation, store.delete, store.cancel):
        with pytest.raises(NotFound):
            await work("b", "resp_done")
    await store.close()


async def test_events_that_are_written_again_are_there_once(redis_server: str) -> None:
    store = RedisResponses(redis_server, KEEP_S)
    asked = ResponsesRequest.model_validate({"input": "Hi!", "background": True})
    response = ResponseAnswer("resp_1", asked, "tiny").response
    await store.save("", {**response, "status": "queued"}, [], deadline=1e12)
    events = [{"type": "x", "sequence_number": number} for number in range(5)]
    for begin, end in ((0, 2), (0, 3), (3, 5), (3, 5)):  # an answer of Redis was lost twice
        assert await store.save("", response, [], deadline=1e12, events=events[begin:end])
    assert len(await store.events("resp_1", -1)) == 5
    assert len(await store.events("resp_1", 3)) == 1
    await store.delete("", "resp_1")
    assert not await store.save("", response, [], deadline=1e12, events=events[4:])
    await store.close()


async def test_events_behind_those_that_redis_has_lost_are_not_given(redis_server: str) -> None:
    """It was killed, and came back with what was on its disk."""
    store = RedisResponses(redis_server, KEEP_S)
    asked = ResponsesRequest.model_validate({"input": "Hi!", "background": True})
    response = ResponseAnswer("resp_1", asked, "tiny").response
    await store.save("", {**response, "status": "queued"}, [], deadline=1e12)
    events = [{"type": "x", "sequence_number": number} for number in range(9)]
    await store.save("", response, [], deadline=1e12, events=events[:6])
    async with Redis.from_url(redis_server) as server:
        await server.ltrim(f"{PREFIX}events:resp_1", 0, 3)
    assert await store.save("", {**response, "status": "completed"}, [], deadline=1e12, events=events[6:])
    assert len(await store.events("resp_1", -1)) == 4
    assert (await store.found("", "resp_1")).response["status"] == "completed"
    await store.close()


async def test_a_connection_that_closes_as_it_is_written_to_is_no_answer(
    redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisResponses(redis_server, KEEP_S)

    async def closed(*_: object, **options: object) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")  # uvloop's

    monkeypatch.setattr(store._redis, "execute_command", closed)
    with pytest.raises(Unavailable):
        await store.found("", "resp_1")
    await store.close()


async def test_without_redis_answers_come_unstored(
    tmp_path: Path, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    store = RedisResponses(f"unix://{tmp_path}/nothing", KEEP_S)
    server = HttpServer(HttpApp(dispatcher, model, AppParts(system=dispatcher.system, responses=store)))
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", verify=False) as http:
        answer = await http.post("/v1/responses", json=ASKED)
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        refused = await http.get("/v1/responses/resp_1")
        assert (refused.status_code, "Redis" in refused.json()["error"]["message"]) == (503, True)
    await server.stop(grace_s=0)


def test_a_malformed_url_is_named() -> None:
    with pytest.raises(CannotStart, match="--responses-file"):
        RedisResponses("nonsense://", KEEP_S)
