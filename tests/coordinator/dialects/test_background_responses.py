"""Responses that go on without their client: fetched later, streamed again, cancelled, left behind."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from typing import Any

import pytest
from openai import AsyncOpenAI
from support.http_fakes import ANSWER, FakeDispatcher

from splitserve.coordinator.dialects import background_responses
from splitserve.coordinator.dialects.responses_body import ResponsesRequest
from splitserve.coordinator.dialects.responses_events import FINAL, Event, ResponseAnswer
from splitserve.coordinator.dialects.responses_store import SqliteResponses
from splitserve.coordinator.dialects.stored_response import ResponseStore, Stored
from splitserve.coordinator.errors import Unavailable
from splitserve.coordinator.lifecycle.request import Ended
from splitserve.coordinator.server import HttpServer

ASKED: Any = {"model": "tiny", "input": "Hi!", "temperature": 0}


async def ended(client: AsyncOpenAI, id: str) -> Any:
    async with asyncio.timeout(60):
        while (response := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return response


async def test_a_response_goes_on_in_the_background(client: AsyncOpenAI) -> None:
    queued = await client.responses.create(background=True, **ASKED)
    assert queued.status == "queued"
    response = await ended(client, queued.id)
    assert (response.status, response.output_text) == ("completed", ANSWER)


async def test_a_stream_from_the_background_is_taken_up_again(
    client: AsyncOpenAI, dispatcher: FakeDispatcher
) -> None:
    dispatcher.step_s = 0.005
    stream = await client.responses.create(background=True, stream=True, **ASKED)
    seen = []
    async for event in stream:
        seen.append(event)
        if len(seen) == 7:
            break
    await stream.close()
    id = seen[0].response.id  # type: ignore[union-attr]
    rest = [event async for event in await client.responses.retrieve(id, stream=True, starting_after=6)]
    assert [event.sequence_number for event in (*seen, *rest)] == list(range(len(seen) + len(rest)))
    text = "".join(e.delta for e in (*seen, *rest) if e.type == "response.output_text.delta")
    assert text == ANSWER
    assert rest[-1].type == "response.completed"


async def test_a_response_in_the_background_is_cancelled(
    client: AsyncOpenAI, dispatcher: FakeDispatcher
) -> None:
    dispatcher.hold = True
    queued = await client.responses.create(background=True, **ASKED)
    while not dispatcher.requests:
        await asyncio.sleep(0.01)
    assert (await client.responses.cancel(queued.id)).status == "cancelled"
    assert (await ended(client, queued.id)).status == "cancelled"
    async with asyncio.timeout(60):
        while not dispatcher.cancelled and dispatcher.running:
            await asyncio.sleep(0.01)


async def test_one_that_its_process_left_behind_has_failed(store: ResponseStore, client: AsyncOpenAI) -> None:
    asked = ResponsesRequest.model_validate({"input": "Hi!", "background": True})
    left = {**ResponseAnswer("resp_left", asked, "tiny").response, "status": "queued"}
    await store.save("", left, [], deadline=1.0)
    response = await client.responses.retrieve("resp_left")
    assert (response.status, response.error is None) == ("failed", False)


@pytest.mark.timeout(100)
async def test_a_store_that_is_away_for_a_while_loses_no_end_and_breaks_no_stream(
    client: AsyncOpenAI, store: SqliteResponses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_responses, "TRY_AGAIN_S", 0.01)
    save, found, refused = store.save, store.found, Counter[str]()

    def refuse(what: str) -> None:
        if refused[what] < 20:
            refused[what] += 1
            raise Unavailable("It is away.", retry_after_s=1)

    async def saved(*stored: Any, events: list[Event] = [], **more: Any) -> bool:  # noqa: B006
        if any(event["type"] in FINAL for event in events):
            refuse("the end")
        return await save(*stored, events=events, **more)

    async def looked_up(*asked: Any) -> Stored:
        refuse("the stream")
        return await found(*asked)

    monkeypatch.setattr(store, "save", saved)
    monkeypatch.setattr(store, "found", looked_up)
    events = [event async for event in await client.responses.create(background=True, stream=True, **ASKED)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert refused == {"the end": 20, "the stream": 20}


@pytest.mark.timeout(100)
async def test_a_stream_of_a_response_that_is_deleted_ends(
    client: AsyncOpenAI, dispatcher: FakeDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher.step_s = 0.01
    async for event in await client.responses.create(background=True, stream=True, **ASKED):
        if event.type == "response.created":
            await client.responses.delete(event.response.id)
    assert "Exception" not in caplog.text


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("unwritten", "status"),
    [
        ("response.output_text.delta", "failed"),
        ("response.completed", "completed"),
        ("response.failed", "failed"),
    ],
)
async def test_a_stop_loses_no_event_that_waits_to_be_written(
    client: AsyncOpenAI,
    server: HttpServer,
    dispatcher: FakeDispatcher,
    store: SqliteResponses,
    monkeypatch: pytest.MonkeyPatch,
    unwritten: str,
    status: str,
) -> None:
    """The store is busy, as with many responses that run."""
    dispatcher.step_s = 0.01  # many writes
    if unwritten == "response.failed":
        dispatcher.fail_after = (5, Ended(error="failed"))
    disk, waiting, save = threading.Event(), asyncio.Event(), store.save

    async def slow_save(*stored: Any, events: list[Event] = [], **more: Any) -> bool:  # noqa: B006
        if not waiting.is_set() and any(event["type"] == unwritten for event in events):
            store._thread.submit(disk.wait, 10)
            waiting.set()
        return await save(*stored, events=events, **more)

    monkeypatch.setattr(store, "save", slow_save)
    id = (await client.responses.create(background=True, **ASKED)).id
    await waiting.wait()
    stopping = asyncio.create_task(server.app.responses.background.stop())
    await asyncio.sleep(0)  # it has begun
    await asyncio.sleep(0)  # what it cancels knows
    disk.set()
    await stopping
    assert (await store.found("", id)).response["status"] == status
    events = [json.loads(event) for event in await store.events(id, -1)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [e["type"] for e in events if e["type"] in FINAL] == [events[-1]["type"]] == [f"response.{status}"]
