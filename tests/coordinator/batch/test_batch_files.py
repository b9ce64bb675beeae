"""Files of batches: which tenants see them, how long they are kept, which are refused."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from starlette.datastructures import UploadFile
from support.batch_server import CHAT, add_file
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.batch import routes
from splitserve.coordinator.batch.lines import Line
from splitserve.coordinator.batch.runner import BatchOptions
from splitserve.coordinator.batch.store import BatchStore
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel


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
        await client.batches.create(
            input_file_id=file.id, endpoint="/v1/moderations", completion_window="24h"
        )
    ids = [(await client.files.create(file=("in.jsonl", b"x"), purpose="batch")).id for _ in range(5)]
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == ids


async def test_a_download_is_in_memory_only_as_far_as_its_client_reads(
    client: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, content_of = list[int](), BatchStore.content

    def counted(store: BatchStore, tenant: str, id: str, at: int = 0) -> bytes | None:
        read.append(at)
        return content_of(store, tenant, id, at)

    monkeypatch.setattr(routes, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(BatchStore, "content", counted)
    content = os.urandom(32 << 20)
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    async with client.files.with_streaming_response.content(file.id) as answer:
        pieces = answer.iter_bytes(1 << 20)
        begin = await anext(pieces)
        assert 1 <= len(read) < 24  # what lies in the sockets' buffers, too
        assert begin + b"".join([piece async for piece in pieces]) == content


def test_what_is_old_is_deleted_unless_it_is_in_use(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches.db")
    batches = {}
    for now, status in ((100.0, "completed"), (100.0, "in_progress"), (900.0, "completed")):
        file = add_file(store, "t", b"x", now)
        batch = store.add_batch("t", 0, {"input_file_id": file.id}, now)
        store.add_lines(batch.id, [Line(1, "a", b"{}")])
        store.change(batch.id, cast(Any, status), {})
        batches[now, status] = (batch.id, file.id)
    add_file(store, "t", b"x", 100.0)
    while store.prune(500.0):
        pass
    left = [ids for key, ids in batches.items() if key != (100.0, "completed")]
    assert {batch.id for batch in store.batches("t", None, 10)} == {batch for batch, _ in left}
    assert {file.id for file in store.files("t", None, None, 10, newest_first=True)} == {
        file for _, file in left
    }
    assert [store.counts(id).total for id, _ in batches.values()] == [0, 1, 1]
    store.close()


def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches.db")
    file = add_file(store, "a", b"x", 1.0)
    batch = store.add_batch("a", 0, {"input_file_id": file.id}, 1.0)
    assert store.file("b", file.id) is store.content("b", file.id) is store.batch("b", batch.id) is None
    assert store.files("b", None, None, 9, newest_first=True) == store.batches("b", None, 9) == []
    store.hide_file("b", file.id)
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
    assert [batch.key_id for batch in store.batches("acme", None, 10)] == [12]
    store.add_batch("acme", 13, {"input_file_id": "file-0"}, 2.0)
    store.close()
    assert secret not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
    BatchStore(path).close()


def test_its_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    path, umask = tmp_path / "batches.db", os.umask(0)
    try:
        store = BatchStore(path)
        add_file(store, "t", b"a prompt", 1.0)
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


async def test_an_upload_is_refused_while_the_last_streams_end(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> None:
    batches = BatchOptions(tmp_path / "batches.db")
    app = HttpApp(dispatcher, model, AppParts(HttpLimits(), dispatcher.system, batches=batches))
    server = HttpServer(app)
    await server.start()
    assert app.batches is not None
    await app.batches.stop()  # as a server that stops does first
    url = f"http://127.0.0.1:{server.port}/v1/files"
    async with httpx.AsyncClient(verify=False, timeout=60) as http:
        answer = await http.post(url, files={"file": ("in.jsonl", b"x")}, data={"purpose": "batch"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "shutting down" in answer.text
    await server.stop(grace_s=0)


async def test_a_file_of_one_part_is_sent_though_the_server_stops(
    dispatcher: FakeDispatcher,
    model: ServedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its end was asked for once more, with a traceback in the log."""
    batches = BatchOptions(tmp_path / "batches.db")
    app = HttpApp(dispatcher, model, AppParts(HttpLimits(), dispatcher.system, batches=batches))
    server = HttpServer(app)
    await server.start()
    assert app.batches is not None
    stopped, content_of, loop = app.batches.stop, BatchStore.content, asyncio.get_running_loop()

    def then_stop(store: BatchStore, tenant: str, id: str, at: int = 0) -> bytes | None:
        if at == 0:
            loop.call_soon_threadsafe(lambda: loop.create_task(stopped()))
        return content_of(store, tenant, id, at)

    monkeypatch.setattr(BatchStore, "content", then_stop)
    url = f"http://127.0.0.1:{server.port}/v1/files"
    async with httpx.AsyncClient(verify=False, timeout=60) as http:
        file = await http.post(url, files={"file": ("in.jsonl", b"abc")}, data={"purpose": "batch"})
        answer = await http.get(f"{url}/{file.json()['id']}/content")
    await server.stop(grace_s=0)
    assert (answer.status_code, answer.content, caplog.records) == (200, b"abc", [])
