"""Runs the requests of batches, a few at a time. Tenants take turns, then keys, then batches; one that
must wait for room or a limit gives its place to others."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from ..errors import StorageFull
from ..generate.plan import ON_TIMEOUT_HEADER
from ..listeners import ListenerFailures
from ..tenants.tenancy import Directory
from .asking import Answer, Asking
from .lines import Line, output_line, used_by
from .store import BatchStore, StoredBatch

T = TypeVar("T")
WAIT_S = 1.0  # before a request without room is tried again, if the answer names no time
MAX_WAIT_S = 60.0  # a limit may be raised before its time is over
STORE_AGAIN_S = 1.0
MAX_TIMEOUTS = 10  # of one request
AGAIN = (429, 503, 504)
Payer = tuple[str, int]
"""A tenant, and the number of the key that pays."""


class Owner(Protocol):
    """Has the store, and decides when there is something to do."""

    failures: ListenerFailures

    def call(self, work: Callable[[BatchStore], T]) -> Awaitable[T]:
        """Do something with the store. Raises StorageFull."""

    def wake(self) -> None:
        """Look for more to do."""


class LineRunner:
    """At most ``max_running`` at a time."""

    def __init__(self, owner: Owner, asking: Asking, directory: Directory, max_running: int) -> None:
        self._owner, self._asking, self._directory = owner, asking, directory
        self._max_running = max_running
        self._running: dict[tuple[str, int], tuple[asyncio.Task[None], Payer]] = {}
        self._resting: dict[Payer, float] = {}  # until when, in monotonic seconds
        self._turns: dict[Payer, tuple[int, str]] = {}  # its last one's number, and its batch
        self._count = itertools.count(1)
        self._timeouts: Counter[tuple[str, int]] = Counter()

    def tasks(self) -> list[asyncio.Task[None]]:
        return [task for task, _ in self._running.values()]

    def rest_s(self) -> float:
        """Return the seconds until a payer has rested; infinite where none does."""
        now = time.monotonic()
        return min([until - now for until in self._resting.values() if until > now], default=float("inf"))

    async def forget(self, batch_id: str) -> None:
        """End what runs of a batch."""
        mine = [task for (id, _), (task, _) in self._running.items() if id == batch_id]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
        for key in [key for key in self._timeouts if key[0] == batch_id]:
            del self._timeouts[key]

    async def fill(self, payers: Sequence[Payer]) -> None:
        """Start requests, up to the bound: tenants with fewer that run come first, then payers that wait
        longest. A payer that is refused meanwhile rests: else this would ask for it without end."""
        now = time.monotonic()
        self._resting = {payer: until for payer, until in self._resting.items() if until > now}
        self._turns = {payer: self._turns.get(payer, (0, "")) for payer in payers}
        ready = [payer for payer in payers if payer not in self._resting]
        while ready and len(self._running) < self._max_running:
            running = Counter(tenant for _, (tenant, _) in self._running.values())
            payer = min(ready, key=lambda payer: (running[payer[0]], self._turns[payer][0]))
            after, taken = self._turns[payer][1], list(self._running)
            next_line = partial(BatchStore.next_line, payer=payer, after=after, running=taken)
            if payer in self._resting or (found := await self._owner.call(next_line)) is None:
                ready.remove(payer)
                continue
            batch_id, line = found
            self._turns[payer] = (next(self._count), batch_id)
            task = asyncio.create_task(self._answer(payer, batch_id, line))
            self._running[batch_id, line.number] = task, payer
            task.add_done_callback(partial(self._over, (batch_id, line.number)))

    def _over(self, key: tuple[str, int], _: asyncio.Task[None]) -> None:
        """Also of one that was cancelled before it began."""
        del self._running[key]
        self._owner.wake()

    async def _answer(self, payer: Payer, batch_id: str, line: Line) -> None:
        try:
            batch = await self._owner.call(lambda store: store.batch(None, batch_id))
            assert batch is not None, "its line is there"
            if (answer := await self._asked(batch, line)) is None:
                return
            request_id = dict(answer.headers).get(b"x-request-id", b"").decode()
            output = output_line(batch_id, line, answer.status, answer.body, request_id)
            used = used_by(answer.status, answer.body)
            await self._keep(lambda store: store.answer(batch_id, line, answer.status, output, used))
            self._timeouts.pop((batch_id, line.number), None)
        except Exception as error:
            self._resting[payer] = time.monotonic() + WAIT_S
            self._owner.failures.note("running batches", error)

    async def _asked(self, batch: StoredBatch, line: Line) -> Answer | None:
        """Ask once, by the key's present account. None while there is no room, no worker, a limit or a
        timeout: its payer rests, and others run in its place."""
        key, wait_s = (batch.id, line.number), WAIT_S
        if (account := self._directory.account_of_key(batch.key_id)) is not None:
            # at last a part is better than nothing
            headers = {ON_TIMEOUT_HEADER: b"error"} if self._timeouts[key] < MAX_TIMEOUTS else {}
            as_batch = account.model_copy(update={"priority_class": "batch"})
            answer = await self._asking.ask(batch.details["endpoint"], line.body, as_batch, headers)
            self._timeouts[key] += answer.status == 504
            wait = dict(answer.headers).get(b"retry-after", b"")
            too_large = answer.status == 429 and not wait  # for its limit, whenever it is asked
            if answer.status not in AGAIN or too_large or self._timeouts[key] > MAX_TIMEOUTS:
                return answer
            wait_s = min(float(wait), MAX_WAIT_S) if wait.isdigit() else WAIT_S
        self._resting[batch.tenant, batch.key_id] = time.monotonic() + wait_s
        return None

    async def _keep(self, work: Callable[[BatchStore], None]) -> None:
        """An answer is computed and metered once: it waits here for space, and is stored though this ends."""
        while True:
            try:
                return await asyncio.shield(self._owner.call(work))
            except StorageFull as error:
                self._owner.failures.note("running batches", error)
            await asyncio.sleep(STORE_AGAIN_S)
