"""Batches through the real client: everything answered once, in files, whatever stops and starts in
between."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from starlette.datastructures import UploadFile
from support.http_fakes import ANSWER, FakeDispatcher

from splitserve.coordinator.batch import routes
from splitserve.coordinator.batch.asking import Asking
from splitserve.coordinator.batch.lines import Line, read_lines
from splitserve.coordinator.batch.runner import BatchOptions, BatchRunner
from splitserve.coordinator.batch.store import BatchStore
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.lifecycle.request import Ended
from splitserve.coordinator.server import HttpApp, HttpServer
from splitserve.coordinator.tenants.tenancy import Everyone
from splitserve.coordinator.text.served_model import ServedModel

CHAT = "/v1/chat/completions"
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


@asynccontextmanager
async def serving(dispatcher: FakeDispatcher, model: ServedModel, path: Path) -> AsyncIterator[AsyncOpenAI]:
    app = HttpApp(
        dispatcher, model, HttpLimits(), dispatcher.system, batches=BatchOptions(path, max_running=4)
    )
    server = HttpServer(app)
    await server.start()
    plain = httpx.AsyncClient(verify=False, timeout=60)  # reading certificates takes longer than a test
    url = f"http://127.0.0.1:{server.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=plain) as client:
        yield client
    await server.stop(grace_s=0)
    assert not dispatcher.running


@pytest.fixture
async def client(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> AsyncIterator[AsyncOpenAI]:
    async with serving(dispatcher, model, tmp_path / "batches.db") as client:
        yield client


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
    assert batch.request_counts.completed + batch.request_counts.failed == 40
    errors = await answers(client, batch.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    failed = await ended(client, (await submit(client, b"{}")).id)
    with pytest.raises(BadRequestError, match="is failed"):
        await client.batches.cancel(failed.id)


async def test_files_come_and_go(client: AsyncOpenAI) -> None:
    file = await client.files.create(file=("in.jsonl", b"abc"), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (3, "in.jsonl", "batch")
    assert (await client.files.retrieve(file.id)).id == file.id
    assert (await client.files.delete(file.id)).deleted
    for call in (client.files.retrieve, client.files.content, client.batches.retrieve):
        with pytest.raises(NotFoundError):
            await call(file.id)
    with pytest.raises(BadRequestError, match="purpose"):
        await client.files.create(file=("in.jsonl", b"abc"), purpose="fine-tune")
    with pytest.raises(NotFoundError, match="no file"):
        await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(BadRequestError, match="endpoint"):
        await client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    ids = [(await client.files.create(file=("in.jsonl", b"x"), purpose="batch")).id for _ in range(5)]
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == ids


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no request"),
        (b"{", "not valid JSON"),
        (jsonl({**line(0), "url": "/v1/completions"}), "url"),
        (jsonl(line(0), line(0)), "used twice"),
        (jsonl(line(0, stream=True)), "not streamed"),
        (jsonl({**line(0), "body": 5}), "body"),
    ],
)
async def test_a_file_that_is_none_fails_the_batch(client: AsyncOpenAI, content: bytes, reason: str) -> None:
    batch = await ended(client, (await submit(client, content)).id)
    assert batch.status == "failed"
    assert reason in batch.errors.data[0].message
    assert read_lines(content, CHAT)[1]


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


def test_what_is_old_is_deleted_unless_it_is_in_use(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches.db")
    batches = {}
    for now, status in ((100.0, "completed"), (100.0, "in_progress"), (900.0, "completed")):
        file = store.add_file("t", "in", "batch", b"x", now)
        batch = store.add_batch("t", 0, {"input_file_id": file.id}, now)
        store.add_lines(batch.id, [Line(0, "a", b"{}")])
        store.change(batch.id, cast(Any, status), {})
        batches[now, status] = (batch.id, file.id)
    store.add_file("t", "forgotten", "batch", b"x", 100.0)
    assert store.prune(500.0) == 3  # a batch, its file, and the one that nobody used
    left = [ids for key, ids in batches.items() if key != (100.0, "completed")]
    assert {batch.id for batch in store.batches("t", None, 10)} == {batch for batch, _ in left}
    assert {file.id for file in store.files("t", None, None, 10, newest_first=True)} == {
        file for _, file in left
    }
    assert [store.counts(id).total for id, _ in batches.values()] == [0, 1, 1]
    assert store.prune(500.0) == 0
    store.close()


def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches.db")
    file = store.add_file("a", "in", "batch", b"x", 1.0)
    batch = store.add_batch("a", 0, {}, 1.0)
    assert store.file("b", file.id) is store.content("b", file.id) is store.batch("b", batch.id) is None
    assert store.files("b", None, None, 9, newest_first=True) == store.batches("b", None, 9) == []
    assert not store.delete_file("b", file.id)
    assert store.content("a", file.id) == b"x"
    store.close()


def test_a_file_of_an_earlier_version_forgets_salts_and_digests(tmp_path: Path) -> None:
    path, secret = tmp_path / "batches.db", b"SALT" * 4
    path.touch(mode=0o600)
    old = sqlite3.connect(path)
    old.execute("PRAGMA journal_mode = WAL")
    old.execute(
        "CREATE TABLE batches (id TEXT PRIMARY KEY, tenant TEXT, created REAL, account BLOB NOT "
        "NULL, status TEXT, details BLOB)"
    )
    old.execute(
        "INSERT INTO batches VALUES ('b', 'acme', 1, ?, 'in_progress', '{}')",
        (msgspec.msgpack.encode({"key_id": 12, "salt": secret}),),
    )
    old.commit()
    old.close()
    assert secret in path.read_bytes()
    store = BatchStore(path)
    assert [batch.key_id for batch in store.open_batches()] == [12]
    store.add_batch("acme", 13, {}, 2.0)
    store.close()
    assert secret not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
    BatchStore(path).close()


def test_its_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    path, umask = tmp_path / "batches.db", os.umask(0)
    try:
        store = BatchStore(path)
        store.add_file("t", "in", "batch", b"a prompt", 1.0)
        assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == dict.fromkeys(
            ("batches.db", "batches.db-wal", "batches.db-shm"), 0o600
        )
        store.close()
    finally:
        os.umask(umask)
    path.chmod(0o644)
    with pytest.raises(
        OSError, match=rf"the batch file {path} is open to other users \(mode 0644\); run: chmod 600 {path}$"
    ):
        BatchStore(path)


async def test_an_upload_without_an_announced_length_ends_at_the_bound(
    client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(routes, "FORM_BYTES", 1 << 16, raising=False)
    kept = 0
    write = UploadFile.write

    async def count(file: UploadFile, data: bytes) -> None:
        nonlocal kept
        kept += len(data)
        await write(file, data)

    monkeypatch.setattr(UploadFile, "write", count)

    async def body() -> AsyncIterator[bytes]:
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(256):
            yield b"x" * (1 << 16)
        yield b"\r\n--x--\r\n"

    async with httpx.AsyncClient(verify=False, timeout=60) as http:
        answer = await http.post(
            f"{client.base_url}files",
            content=body(),
            headers={"content-type": "multipart/form-data; boundary=x"},
        )
    assert answer.status_code == 413
    assert kept < 2 << 20
