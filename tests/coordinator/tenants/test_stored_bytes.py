"""What a tenant stores is bounded and counted exactly, and its large work holds up no other tenant."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, RateLimitError
from starlette.applications import Starlette
from support.batch_server import add_file
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.batch import routes
from splitserve.coordinator.batch.lines import LineReader
from splitserve.coordinator.batch.runner import BatchOptions
from splitserve.coordinator.batch.store import BatchStore
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.routes.tenants import tenant_routes
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.stored_bytes import ROW_BYTES, StorageLimitReached, StoredBytes, stored_in
from splitserve.coordinator.tenants.limits import MAX_STORED_MIB
from splitserve.coordinator.tenants.opening import KeyDirectory
from splitserve.coordinator.tenants.shared_limiter import SharedLimiter
from splitserve.coordinator.tenants.store import TenantStore
from splitserve.coordinator.tenants.tenancy import Tenancy
from splitserve.coordinator.text.served_model import ServedModel

MIB = 1 << 20
PATH: Any = "/v1/completions"


@pytest.fixture
async def clients(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> AsyncIterator[tuple[AsyncOpenAI, AsyncOpenAI]]:
    """Two tenants' clients. Each may store 1 MiB; the second may send few tokens a day."""
    tenants = TenantStore(tmp_path / "tenants", create=True)
    tenants.set_tier("small", None, {"max_stored_mib": 1})
    tenants.set_tier("poor", None, {"max_stored_mib": 1, "tokens_per_minute": 100, "tokens_per_day": 40})
    keys = []
    for name, tier in (("a", "small"), ("b", "poor")):
        tenants.set_tenant(name, tier=tier)
        keys.append(tenants.create_key(name).key)
    directory, limiter = KeyDirectory(tmp_path / "tenants"), SharedLimiter(tmp_path / "limits")
    parts = AppParts(
        HttpLimits(),
        dispatcher.system,
        tenancy=Tenancy(directory, limiter),
        batches=BatchOptions(tmp_path / "batches", max_running=4),
    )
    server = HttpServer(HttpApp(dispatcher, model, parts))
    await server.start()
    url, plain = f"http://127.0.0.1:{server.port}/v1", httpx.AsyncClient(verify=False, timeout=60)
    one, two = (AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=plain) for key in keys)
    yield one, two
    await plain.aclose()
    await server.stop(grace_s=0)
    await limiter.stop()
    directory.close()
    tenants.close()


def lines(count: int, **body: Any) -> bytes:
    asked = {"method": "POST", "url": PATH, "body": {"prompt": "quick", "max_tokens": 4, **body}}
    return b"".join(json.dumps({"custom_id": f"r{i}", **asked}).encode() + b"\n" for i in range(count))


async def submit(client: AsyncOpenAI, content: bytes) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h")


async def ended(client: AsyncOpenAI, id: str) -> Any:
    async with asyncio.timeout(60):
        while (batch := await client.batches.retrieve(id)).status in (
            "validating",
            "in_progress",
            "finalizing",
        ):
            await asyncio.sleep(0.01)
    return batch


async def test_a_tenant_stores_no_more_than_it_may(
    clients: tuple[AsyncOpenAI, AsyncOpenAI], tmp_path: Path
) -> None:
    one, other = clients
    kept = await one.files.create(file=("in.jsonl", b"x" * (MIB // 2)), purpose="batch")
    for size in (MIB // 2, 3 * MIB):
        with pytest.raises(BadRequestError, match="exceeded your file storage quota") as refused:
            await one.files.create(file=("in.jsonl", b"x" * size), purpose="batch")
        assert refused.value.code == "storage_limit_exceeded"
    with pytest.raises(BadRequestError, match="1 MiB of files and batches"):  # it copies its input
        await one.batches.create(input_file_id=kept.id, endpoint=PATH, completion_window="24h")
    assert [file.id async for file in one.files.list()] == [kept.id]
    assert stored_in(tmp_path / "batches")["a"] == MIB // 2 + ROW_BYTES
    await other.files.create(file=("in.jsonl", b"x" * (MIB // 2)), purpose="batch")
    listed = await one.files.with_raw_response.list()
    assert listed.headers["x-ratelimit-limit-stored-bytes"] == str(MIB)
    assert listed.headers["x-ratelimit-remaining-stored-bytes"] == str(MIB // 2 - ROW_BYTES)
    await one.files.delete(kept.id)
    assert "a" not in stored_in(tmp_path / "batches")
    await one.files.create(file=("in.jsonl", b"x" * (MIB // 2)), purpose="batch")


async def test_answers_that_exceed_it_end_the_batch_and_what_there_is_can_be_fetched(
    clients: tuple[AsyncOpenAI, AsyncOpenAI], dispatcher: FakeDispatcher, tmp_path: Path
) -> None:
    one, dispatcher.step_s = clients[0], 0.005
    file = await one.files.create(file=("big", b"x" * (MIB - 40 * ROW_BYTES)), purpose="batch")
    batch = await ended(one, (await submit(one, lines(120, max_tokens=400))).id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_limit_exceeded")
    counts = batch.request_counts
    assert counts.completed + counts.failed == counts.total == 120
    assert counts.completed > 0 < counts.failed
    output, error = [await one.files.content(id) for id in (batch.output_file_id, batch.error_file_id)]
    assert (len(output.text.splitlines()), len(error.text.splitlines())) == (counts.completed, counts.failed)
    files = [file.bytes async for file in one.files.list()]
    assert stored_in(tmp_path / "batches")["a"] == sum(files) + ROW_BYTES * (len(files) + 1)
    await one.files.delete(file.id)
    assert (await ended(one, (await submit(one, lines(2))).id)).status == "completed"


async def test_one_that_waits_for_its_limit_gives_its_place_to_others(
    clients: tuple[AsyncOpenAI, AsyncOpenAI],
) -> None:
    """Its requests wait until midnight; they held all the places that batches have."""
    one, poor = clients
    waiting = [await submit(poor, lines(8)) for _ in range(3)]
    async with asyncio.timeout(60):
        while not (await poor.batches.retrieve(waiting[0].id)).request_counts.completed:
            await asyncio.sleep(0.01)
    assert (await ended(one, (await submit(one, lines(8))).id)).request_counts.completed == 8
    assert {(await poor.batches.retrieve(batch.id)).status for batch in waiting} == {"in_progress"}


async def test_a_request_larger_than_its_limit_is_answered_so(
    clients: tuple[AsyncOpenAI, AsyncOpenAI],
) -> None:
    """It was asked again each second, for a day."""
    batch = await ended(clients[1], (await submit(clients[1], lines(1, max_tokens=400))).id)
    error = (await clients[1].files.content(batch.error_file_id)).json()["response"]
    assert (error["status_code"], "Request too large" in error["body"]["error"]["message"]) == (429, True)


async def test_others_go_on_while_a_file_is_validated(
    clients: tuple[AsyncOpenAI, AsyncOpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on, feed = threading.Event(), threading.Event(), LineReader.feed

    def slow(reader: LineReader, part: bytes) -> Any:
        reading.set()
        assert go_on.wait(60)
        return feed(reader, part)

    monkeypatch.setattr(LineReader, "feed", slow)
    batch = await submit(clients[0], lines(3))
    assert await asyncio.to_thread(reading.wait, 60)
    async with asyncio.timeout(60):
        other = await clients[1].files.create(file=("in.jsonl", b"x"), purpose="batch")
        assert (await clients[1].files.content(other.id)).content == b"x"
        assert (await clients[0].batches.retrieve(batch.id)).status == "validating"
    go_on.set()
    assert (await ended(clients[0], batch.id)).request_counts.completed == 3


async def test_slow_uploads_of_one_tenant_are_bounded(
    clients: tuple[AsyncOpenAI, AsyncOpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_UPLOADS", 1)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        begun.set()
        await go_on.wait()
        yield b"x\r\n--x--\r\n"

    one, other = clients
    headers = {"content-type": "multipart/form-data; boundary=x", **one.auth_headers}
    async with httpx.AsyncClient(verify=False, timeout=60) as http:
        slow = asyncio.create_task(http.post(f"{one.base_url}files", content=body(), headers=headers))
        await begun.wait()
        async with asyncio.timeout(60):
            while True:
                upload = one.files.create(file=("in.jsonl", b"x"), purpose="batch")
                (refused,) = await asyncio.gather(upload, return_exceptions=True)
                if isinstance(refused, RateLimitError):
                    break
        assert refused.response.headers["retry-after"] == "1"
        await other.files.create(file=("in.jsonl", b"x"), purpose="batch")
        go_on.set()
        await slow
        await one.files.create(file=("in.jsonl", b"x"), purpose="batch")


async def test_usage_is_in_the_admin_view_and_the_metrics(
    clients: tuple[AsyncOpenAI, AsyncOpenAI], tmp_path: Path
) -> None:
    await clients[0].files.create(file=("in.jsonl", b"x" * 100), purpose="batch")
    app = Starlette(routes=tenant_routes(tmp_path / "tenants", {"files": tmp_path / "batches"}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        found = (await http.get("/admin/tenants")).json()["tenants"]
        assert {one["name"]: one["stored_bytes_of_files"] for one in found} == {"a": 100 + ROW_BYTES, "b": 0}
        tiers = (await http.get("/admin/tiers")).json()["tiers"]
    assert {tier["name"]: tier["max_stored_mib"] for tier in tiers}["standard"] == MAX_STORED_MIB
    stored = StoredBytes({"files": tmp_path / "batches"})
    following = asyncio.create_task(stored.follow())
    async with asyncio.timeout(60):
        while not (samples := next(stored.collect()).samples):
            await asyncio.sleep(0.01)
    following.cancel()
    assert (samples[0].labels, samples[0].value) == ({"tenant": "a", "what": "files"}, 100 + ROW_BYTES)


def test_a_folder_that_is_gone_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that looks there ended the process."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert stored_in(Path("batches")) == {}


def test_the_count_is_that_of_the_rows_whatever_happens(tmp_path: Path) -> None:
    """Two processes, a restart, a process killed in mid-upload, expiry, a refused part, and a batch."""
    path = tmp_path / "batches.db"
    one, two = BatchStore(path), BatchStore(path)

    def check(expected: int) -> None:
        db = sqlite3.connect(path)
        rows = "SELECT coalesce(sum({}), 0) + {} * count(*) FROM {}"
        found = [
            db.execute(rows.format(column, ROW_BYTES, table)).fetchone()[0]
            for table, column in (("files", "num_bytes"), ("batches", "bytes"))
        ]
        parts = db.execute("SELECT coalesce(sum(length(content)), 0) FROM parts").fetchone()[0]
        assert sum(found) == stored_in(path).get("t", 0) == expected
        assert parts == found[0] - ROW_BYTES * db.execute("SELECT count(*) FROM files").fetchone()[0]
        db.close()

    file = add_file(one, "t", b"x" * 1000, 100.0)
    half = two.begin_file("t", "half", 100.0, 10_000)
    two.add_part("t", half, b"x" * 500, 10_000)
    with pytest.raises(StorageLimitReached):
        one.add_part("t", half, b"x" * 9000, 10_000)
    check(1500 + 2 * ROW_BYTES)
    two.close()  # before it was whole
    two = BatchStore(path)
    batch = two.add_batch("t", 0, {"input_file_id": file.id, "expires_at": 1e12}, 100.0)
    check(2500 + 3 * ROW_BYTES)
    while one.prune(50.0, left_before=200.0):
        pass
    check(2000 + 2 * ROW_BYTES)  # an open batch needs its file
    one.validated(batch.id, "failed", {}, 0)
    while one.prune(200.0):
        pass
    check(0)
    one.close()
    two.close()


def test_a_tenants_file_of_an_earlier_version_is_bounded_and_goes_back(tmp_path: Path) -> None:
    """By a version of its own the coordinators of before, in a rolling upgrade, refused it."""
    path = tmp_path / "tenants"
    store = TenantStore(path, create=True)
    store.set_tenant("acme")
    store.create_key("acme")
    store.close()
    db = sqlite3.connect(path)
    db.execute("ALTER TABLE tiers DROP COLUMN max_stored_mib")
    store = TenantStore(path)
    (account,) = store.accounts(time.time()).values()
    assert account.max_stored_bytes == MAX_STORED_MIB << 20
    assert db.execute("PRAGMA user_version").fetchone() == (1,)
    db.close()
    for mib, expected in ((0, None), (1 << 50, 1 << 70)):
        store.set_tier("standard", None, {"max_stored_mib": mib})
        assert next(iter(store.accounts(time.time()).values())).max_stored_bytes == expected
    store.close()
