"""Batches through the real client: everything answered once, in files, whatever stops and starts in
between."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from support.batch_server import CHAT, serving
from support.http_fakes import ANSWER, FakeDispatcher

from splitserve.coordinator.batch import lines
from splitserve.coordinator.batch.asking import Asking
from splitserve.coordinator.batch.lines import LineReader
from splitserve.coordinator.batch.runner import BatchOptions, BatchRunner
from splitserve.coordinator.batch.store import BatchStore
from splitserve.coordinator.lifecycle.request import Ended
from splitserve.coordinator.server import HttpApp
from splitserve.coordinator.tenants.tenancy import Everyone
from splitserve.coordinator.text.served_model import ServedModel

OVER = ("completed", "failed", "cancelled", "expired")
STEP_S = 0.002
"""Between two tokens, where a batch is looked at before it is over: an answer takes longer than two looks."""


def line(number: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Hi {number}"}]
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": CHAT,
        "body": {"messages": messages, "temperature": 0, **body},
    }


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def submit(client: AsyncOpenAI, content: bytes, endpoint: Any = CHAT) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


async def until(look: Callable[[], Awaitable[Any]], condition: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + 60
    while not condition(found := await look()):
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.01)
    return found


async def ended(client: AsyncOpenAI, id: str) -> Any:
    return await until(lambda: client.batches.retrieve(id), lambda batch: batch.status in OVER)


async def answers(client: AsyncOpenAI, file_id: str) -> list[Any]:
    content = await client.files.content(file_id)
    return [json.loads(each) for each in content.text.splitlines()]


async def test_every_request_is_answered_in_a_file(client: AsyncOpenAI, dispatcher: FakeDispatcher) -> None:
    batch = await submit(client, jsonl(*(line(i) for i in range(9)), line(9, temperature="warm")))
    assert batch.object == "batch"
    batch = await ended(client, batch.id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        10,
        9,
        1,
    )
    assert batch.metadata == {"a": "b"}
    good = await answers(client, batch.output_file_id)
    assert [each["custom_id"] for each in good] == [f"r{i}" for i in range(9)]
    assert {each["response"]["body"]["choices"][0]["message"]["content"] for each in good} == {ANSWER}
    (bad,) = await answers(client, batch.error_file_id)
    assert bad["custom_id"] == "r9"
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "temperature"
    reported = [each["response"]["body"]["usage"] for each in good]
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in reported) > 0
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in reported) > 0
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    assert batch.usage.input_tokens_details.cached_tokens == sum(
        usage["prompt_tokens_details"]["cached_tokens"] for usage in reported
    )
    assert {request.priority_class for request in dispatcher.requests} == {"batch"}
    assert [listed.id async for listed in client.batches.list()] == [batch.id]
    assert {file.purpose async for file in client.files.list()} == {"batch", "batch_output"}


@pytest.mark.parametrize(
    ("path", "asked", "bad", "text"),
    [
        ("/v1/responses", {"input": "Hi"}, {"background": True}, ["output", 0, "content", 0, "text"]),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900},
            {"stream": True},
            ["content", 0, "text"],
        ),
    ],
)
async def test_lines_may_be_of_other_apis(
    client: AsyncOpenAI,
    dispatcher: FakeDispatcher,
    monkeypatch: pytest.MonkeyPatch,
    path: Any,
    asked: dict[str, Any],
    bad: dict[str, Any],
    text: list[Any],
) -> None:
    def one(number: int, **more: Any) -> dict[str, Any]:
        return {**line(number), "url": path, "body": {**asked, "temperature": 0, **more}}

    late = 3, Ended(error="deadline", message="Too late.")
    monkeypatch.setattr(dispatcher, "fails_after", lambda r: late if len(dispatcher.requests) == 1 else None)
    batch = await ended(client, (await submit(client, jsonl(one(0), one(1, top_p=7)), path)).id)
    (good,) = await answers(client, batch.output_file_id)
    found = good["response"]["body"]
    for step in text:
        found = found[step]
    assert found == ANSWER
    (refused,) = await answers(client, batch.error_file_id)
    assert refused["response"]["status_code"] == 400
    assert "top_p" in refused["response"]["body"]["error"]["message"]
    assert batch.usage.input_tokens > batch.usage.input_tokens_details.cached_tokens == 3
    assert batch.usage.output_tokens > 20
    assert [request.priority_class for request in dispatcher.requests] == ["batch"] * 2  # one came too late
    failed = await ended(client, (await submit(client, jsonl(one(0, **bad)), path)).id)
    assert (failed.status, next(iter(bad)) in failed.errors.data[0].message) == ("failed", True)


async def test_a_restart_goes_on_with_what_was_not_answered(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> None:
    path, num_lines, dispatcher.step_s = tmp_path / "batches.db", 30, STEP_S
    async with serving(dispatcher, model, path) as client:
        batch = await submit(client, jsonl(*(line(i) for i in range(num_lines))))
        before = await until(
            lambda: client.batches.retrieve(batch.id), lambda b: b.request_counts.completed >= 3
        )
        dispatcher.hold = True
    assert before.status == "in_progress"
    store = BatchStore(path)
    num_answered = store.counts(batch.id).completed
    store.close()
    assert 3 <= num_answered < num_lines
    dispatcher.hold, dispatcher.step_s, num_asked = False, 0, len(dispatcher.requests)
    async with serving(dispatcher, model, path) as client:
        batch = await ended(client, batch.id)
        assert batch.request_counts.completed == num_lines
        assert [each["custom_id"] for each in await answers(client, batch.output_file_id)] == [
            f"r{i}" for i in range(num_lines)
        ]
    assert (
        len(dispatcher.requests) - num_asked == num_lines - num_answered
    )  # nothing answered was asked again


async def test_an_unknown_field_is_not_kept_and_says_nothing_of_the_batch(
    client: AsyncOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    """A field named as one of the answer's was given back as if it were that, and cancelling took its ``id``
    for the batch's."""
    mine = await submit(client, jsonl(line(0)))
    file = await client.files.create(file=("in.jsonl", jsonl(line(0))), purpose="batch")
    false = {
        "id": mine.id,
        "status": "expired",
        "output_file_id": "file-0",
        "output_expires_after": {"seconds": 3600},
    }
    with caplog.at_level("INFO", "splitserve.coordinator"):
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", extra_body=false
        )
    assert batch.id != mine.id
    assert batch.status == "validating"
    assert not set(batch.model_extra or {}) & {"output_expires_after"}
    assert "'id', 'output_expires_after', 'output_file_id', 'status'" in caplog.text
    assert (await ended(client, batch.id)).output_file_id != "file-0"


async def test_no_room_is_no_failure(client: AsyncOpenAI, dispatcher: FakeDispatcher) -> None:
    dispatcher.workers = False
    batch = await submit(client, jsonl(line(0)))
    await until(lambda: client.batches.retrieve(batch.id), lambda b: b.status == "in_progress")
    dispatcher.workers = True
    assert (await ended(client, batch.id)).request_counts.completed == 1


async def test_a_cancelled_batch_gives_what_there_is(client: AsyncOpenAI, dispatcher: FakeDispatcher) -> None:
    dispatcher.step_s = STEP_S
    batch = await submit(client, jsonl(*(line(i) for i in range(40))))
    await until(lambda: client.batches.retrieve(batch.id), lambda b: b.request_counts.completed >= 1)
    dispatcher.hold = True
    assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    batch = await ended(client, batch.id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None
    assert not batch.model_extra, "no field that OpenAI's batches lack"
    assert batch.request_counts.completed + batch.request_counts.failed == 40
    errors = await answers(client, batch.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    failed = await ended(client, (await submit(client, b"{}")).id)
    with pytest.raises(BadRequestError, match="is failed"):
        await client.batches.cancel(failed.id)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no request"),
        (b"{", "not valid JSON"),
        (jsonl({**line(0), "url": "/v1/completions"}), "url"),
        (jsonl(line(0), line(0)), "used twice"),
        (jsonl(line(0, stream=True)), "not streamed"),
        (jsonl({**line(0), "body": 5}), "body"),
        (jsonl(line(0, tools=json.loads("[" * 300 + "]" * 300))), "Recursion limit"),
    ],
)
async def test_a_file_that_is_none_fails_the_batch(client: AsyncOpenAI, content: bytes, reason: str) -> None:
    batch = await ended(client, (await submit(client, content)).id)
    assert batch.status == "failed"
    assert reason in batch.errors.data[0].message
    reader = LineReader(CHAT)
    for part in (content, b""):
        reader.feed(part)
    assert reader.errors


def test_a_line_without_an_end_is_not_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of one line was put together anew with each of its parts, and parsed at once."""
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 2500)
    reader, part = LineReader(CHAT), b"x" * 1000
    num_read = next(i for i in range(1, 9) if not reader.feed(part) and reader.done)
    assert (num_read, reader.errors[0].number) == (3, 1)
    assert "longer than" in reader.errors[0].message


async def test_of_two_processes_one_runs_the_batches_and_the_other_goes_on(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> None:
    path, num_lines, dispatcher.step_s = tmp_path / "batches.db", 12, STEP_S
    heir = FakeDispatcher(
        dispatcher.script
    )  # may begin as soon as the first has let go, which is before that has stopped
    async with AsyncExitStack() as first:
        client = await first.enter_async_context(serving(dispatcher, model, path))
        async with serving(heir, model, path) as other:
            batch = await submit(other, jsonl(*(line(i) for i in range(num_lines))))  # at either of them
            await until(lambda: client.batches.retrieve(batch.id), lambda b: b.request_counts.completed >= 1)
            dispatcher.hold = True
            await until(lambda: client.batches.retrieve(batch.id), lambda b: len(dispatcher.running) > 0)
            assert len(dispatcher.running) <= 4  # one process's worth
            assert not heir.requests
            await first.aclose()
            batch = await ended(other, batch.id)
            assert batch.request_counts.completed == num_lines
            assert 0 < len(heir.requests) < num_lines
            assert len(await answers(other, batch.output_file_id)) == num_lines


@pytest.mark.parametrize("turns", range(5))
async def test_it_stops_whatever_has_just_changed(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path, turns: int
) -> None:
    """``asyncio.wait_for`` returned what it had waited for, and not that it was cancelled, where both came
    within a turn of the loop."""
    asking = Asking(HttpApp(dispatcher, model).generation, {})
    runner = BatchRunner(BatchOptions(tmp_path / "batches.db"), asking, Everyone())
    runner.start()
    async with asyncio.timeout(60):
        while not runner._changed._waiters:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        runner.wake()
        for _ in range(turns):
            await asyncio.sleep(0)
        await runner.stop()
