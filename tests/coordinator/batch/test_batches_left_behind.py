"""Batches that something left half done: a cancelled request, an earlier version, a process that ended."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from support.batch_server import CHAT, add_file, serving
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.batch.asking import Answer, Asking
from splitserve.coordinator.batch.line_runner import LineRunner
from splitserve.coordinator.batch.lines import Line
from splitserve.coordinator.batch.runner import BatchOptions, BatchRunner
from splitserve.coordinator.batch.store import BatchStore
from splitserve.coordinator.listeners import ListenerFailures
from splitserve.coordinator.server import HttpApp
from splitserve.coordinator.tenants.tenancy import Everyone
from splitserve.coordinator.text.served_model import ServedModel

T = TypeVar("T")
MESSAGES = b'{"messages": [{"role": "user", "content": "Hi"}]}'


def batch_of(store: BatchStore, num_lines: int, **details: Any) -> str:
    """Return the id of one in progress, none of whose requests is answered."""
    now = int(time.time())
    file = add_file(store, "", b"x", now)
    known = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", "created_at": now}
    id = store.add_batch("", 0, {**known, "expires_at": now + 3600, **details}, now).id
    store.add_lines(id, [Line(number, f"r{number}", MESSAGES) for number in range(1, num_lines + 1)])
    store.validated(id, "in_progress", {}, num_lines * len(MESSAGES))
    return id


async def test_a_request_that_is_cancelled_before_it_begins_gives_its_place_back(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> None:
    """A batch was cancelled in the turn of the loop that began its request: its place was lost for good."""

    class Owner:
        store, failures, woken = BatchStore(tmp_path / "batches.db"), ListenerFailures(), 0

        async def call(self, work: Callable[[BatchStore], T]) -> T:
            return work(self.store)

        def wake(self) -> None:
            self.woken += 1

    owner = Owner()
    lines = LineRunner(owner, Asking(HttpApp(dispatcher, model).generation, {}), Everyone(), 1)
    id = batch_of(owner.store, 1)
    await lines.fill(owner.store.payers())
    await lines.forget(id)
    assert (lines.tasks(), owner.woken, dispatcher.requests) == ([], 1, [])
    await lines.fill(owner.store.payers())
    (task,) = lines.tasks()
    await task
    assert owner.store.counts(id).completed == 1
    owner.store.close()


async def test_one_whose_last_answer_an_earlier_version_stored_is_ended(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> None:
    """That version ended it at its next look, for which it was stopped too soon."""
    path = tmp_path / "batches.db"
    store = BatchStore(path)
    id = batch_of(store, 1)
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE lines SET status = 200, output = x'7b7d' WHERE batch = ?", (id,))
    db.close()
    async with serving(dispatcher, model, path) as client:
        async with asyncio.timeout(60):
            while (await client.batches.retrieve(id)).status != "completed":
                await asyncio.sleep(0.01)
    assert not dispatcher.requests


async def test_an_answer_that_waits_to_be_stored_is_stored_though_the_server_stops(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> None:
    """It was computed and metered again."""
    path, disk, waiting = tmp_path / "batches.db", threading.Event(), asyncio.Event()
    store = BatchStore(path)
    id = batch_of(store, 1)
    store.close()

    class OnABusyDisk(Asking):
        async def ask(self, *asked: Any) -> Answer:
            answer = await super().ask(*asked)
            runner._thread.submit(disk.wait, 10)
            asyncio.get_running_loop().call_soon(waiting.set)
            return answer

    asking = OnABusyDisk(HttpApp(dispatcher, model).generation, {})
    runner = BatchRunner(BatchOptions(path), asking, Everyone())
    runner.start()
    await waiting.wait()
    stopping = asyncio.create_task(runner.stop())
    await asyncio.sleep(0)  # it has begun
    await asyncio.sleep(0)  # what it cancels knows
    disk.set()
    await stopping
    store = BatchStore(path)
    assert store.counts(id).completed == 1
    store.close()
