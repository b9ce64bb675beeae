"""Responses that go on without their client, and streams of theirs that can be taken up again.

Their events lie in the store, numbered; a stream reads them there, whichever process runs the response.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..errors import ApiError, InternalError, InvalidRequest, NotFound, StorageFull, Unavailable
from ..http.answers import account_of, json_response
from ..tenants.limits import Account
from .chat_stream import ChatStream
from .responses_events import FINAL, ResponseAnswer
from .responses_items import Item
from .routes import EVENT_STREAM, Dialect, Event, events_of
from .stored_response import RUNNING, ResponseStore, Stored

WRITE_EVERY_S = 0.05
LOOK_EVERY_S = 0.2
"""For events that another process writes."""
TRY_AGAIN_S, STOP_S = 1.0, 4.0
"""For the end of a response, while its store is full or does not answer; when this process stops."""
_log = logging.getLogger(__name__)


class BackgroundResponses:
    """Runs them as tasks of this process. ``store`` None: there are none."""

    def __init__(self, dialect: Dialect, store: ResponseStore | None) -> None:
        self._dialect, self._store = dialect, store
        self._running: dict[str, tuple[asyncio.Task[None], _Run]] = {}

    async def begin(
        self,
        request: Request,
        chat: dict[str, Any],
        answer: ResponseAnswer,
        items: Sequence[Item],
        prefers: str = "",
        *,
        streamed: bool,
    ) -> Response:
        """Return the queued response, or its stream. ``prefers``: see ``Call``. Raises StorageFull;
        InvalidRequest without a store."""
        if self._store is None:
            raise InvalidRequest("background: this server stores no responses; give --responses-file")
        account, headers = account_of(request), dict(request.scope["headers"])
        answer.response["status"], id = "queued", answer.response["id"]
        deadline = time.time() + self._dialect.generation.limits.request_timeout_s
        most = account.max_stored_bytes
        await self._store.save(account.tenant, answer.response, items, deadline=deadline, max_bytes=most)
        first = json_response(answer.response)
        stored = Stored(id, dict(answer.response), list(items), None, True)
        answer.response["status"] = "in_progress"
        run = _Run(self._store, account, answer, items, deadline)
        stream = ChatStream(self._dialect.generation, account, headers, chat, prefers=prefers)
        task = asyncio.create_task(run.run(stream))
        self._running[id] = task, run
        task.add_done_callback(lambda _: self._over(id))
        return self.resume(account.tenant, stored, -1) if streamed else first

    def resume(self, tenant: str, stored: Stored, after: int) -> Response:
        """Return the stream of a response from the event after ``after`` on. Raises InvalidRequest."""
        if not stored.response["background"]:
            raise InvalidRequest("stream: only a response that runs in the background can be streamed again")
        events = self._events(tenant, stored.id, after)
        return StreamingResponse(events, 200, EVENT_STREAM, "text/event-stream")

    def look(self, id: str) -> None:
        """Look at once whether a response was cancelled."""
        if (running := self._running.get(id)) is not None:
            running[0].cancel()

    async def stop(self) -> None:
        """End all that run here: they have failed, except those whose end is being written."""
        tasks = [task for task, _ in self._running.values()]
        for task, run in self._running.values():
            if run.answer.response["status"] in RUNNING:
                task.cancel()
        if tasks:
            for task in (await asyncio.wait(tasks, timeout=STOP_S))[1]:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _over(self, id: str) -> None:
        self._running.pop(id)[1].written.set()

    async def _events(self, tenant: str, id: str, after: int) -> AsyncIterator[bytes]:
        assert self._store is not None
        until = time.monotonic() + self._dialect.generation.limits.request_timeout_s
        while True:
            written = self._running[id][1].written if id in self._running else None
            if written is not None:
                written.clear()
            try:
                running = (await self._store.found(tenant, id)).running
                events = await self._store.events(id, after)
            except Unavailable:
                if time.monotonic() > until:
                    return
                await asyncio.sleep(TRY_AGAIN_S)
                continue
            except NotFound:  # deleted meanwhile
                return
            for data in events:
                event = orjson.loads(data)
                after = event["sequence_number"]
                yield b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)
                if event["type"] in FINAL:
                    return
            if not running:
                return
            if written is None:
                await asyncio.sleep(LOOK_EVERY_S)
            else:
                await written.wait()


class _Run:
    """One of them."""

    def __init__(
        self,
        store: ResponseStore,
        account: Account,
        answer: ResponseAnswer,
        items: Sequence[Item],
        deadline: float,
    ) -> None:
        self.answer, self.written = answer, asyncio.Event()  # set when events were written
        self._store, self._account, self._items, self._deadline = store, account, items, deadline
        self._new: list[Event] = []
        self._write_at, self._unwritten = 0.0, False

    async def run(self, stream: ChatStream) -> None:
        """Run it to its end, or until it is cancelled."""
        id = self.answer.response["id"]
        try:
            await self._generate(stream)
        except asyncio.CancelledError:
            with contextlib.suppress(ApiError):
                stops = self.answer.response["status"] in RUNNING  # this process, or the client's wish
                if stops and (await self._store.found(self._account.tenant, id)).running:
                    await self._fail(Unavailable("The server is shutting down."))
            raise
        except ApiError as error:
            await self._fail(error)
        except Exception:
            _log.exception("%s: a response in the background has failed", id)
            await self._fail(InternalError(f"Internal error; the server's log says more under {id}."))

    async def _generate(self, stream: ChatStream) -> None:
        try:
            await stream.begin()
            async for event in events_of(stream, self.answer):
                self._new.append(event)
                if not await self._write(last=event["type"] in FINAL):
                    return
        finally:
            stream.abandon()

    async def _fail(self, error: ApiError) -> None:
        self._new += self.answer.fail(error)
        await self._write(last=True)

    async def _write(self, *, last: bool) -> bool:
        """Write new events, now and then. Return False once the response was cancelled or deleted."""
        if not last and time.monotonic() < self._write_at:
            return True
        self._write_at = time.monotonic() + WRITE_EVERY_S
        while True:
            try:
                going_on = await self._store.save(
                    self._account.tenant,
                    self.answer.response,
                    self._items,
                    deadline=self._deadline,
                    events=self._new,
                )
                self._new = []  # not before: a write that fails or is cancelled is done once more
                self._unwritten = False
                self.written.set()
                return going_on
            except (StorageFull, Unavailable) as error:
                if not self._unwritten:
                    _log.error("%s is not stored: %s", self.answer.response["id"], error)
                self._unwritten = True
                if not last or time.time() > self._deadline:
                    return not last
            await asyncio.sleep(TRY_AGAIN_S)
