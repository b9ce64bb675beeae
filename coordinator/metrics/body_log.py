"""Requests for tokens and their answers, verbatim (--log-bodies). Personal data: see docs/observability.md.

One JSON object a line: ``time``, ``request_id``, ``endpoint``, ``tenant``, ``status``, ``request``,
``answer``; ``truncated`` where one of the two was longer than MAX_BYTES. The chunks of a stream are joined to
one answer. No API key is written, not even one in a request's body. A thread writes, into a file of mode 0600
that is rotated: FILE and FILE.1 together hold at most MAX_FILE_BYTES.
"""

from __future__ import annotations

import errno
import os
import queue
import re
import threading
import time
from pathlib import Path
from typing import Any

import orjson

from ...transport.process.private_files import OpenToOthers, private, require_private
from ..errors import CannotStart, Headers
from ..http.call import Call
from ..listeners import ListenerFailures
from ..tenants.api_key import bearer
from .settings import RecordSettings

MAX_BYTES = 1 << 20
"""Most bytes of a request's body, and of an answer's text."""
MAX_FILE_BYTES = 100 << 20
"""Of FILE and FILE.1 together: some hours of a busy server, and a disk's small change."""
MAX_PENDING_BYTES = 32 << 20
"""Lines that wait to be written, where the disk is too slow; what is beyond them is dropped and counted."""
NAME = "body log"
SECRET_FIELD = re.compile(r"(?i)(api[-_]?key|authorization|access[-_]?token)$")
OUR_KEY = re.compile(rb"sk-split-[A-Za-z0-9_-]{20,}")
MIN_KEY_CHARS = 16
"""A shorter key that a client has sent is no secret, and may be a part of any word."""
REDACTED = "[redacted]"


class RecordedCall:
    """An ``Answering`` that passes an answer on to its ``Call``, and remembers it."""

    def __init__(self, call: Call, failures: ListenerFailures) -> None:
        self.account = call.account
        self.request = bytes(call.body[: MAX_BYTES + 1])
        self.whole = b""
        self.stream = JoinedStream()
        self._call, self._failures = call, failures

    @property
    def client(self) -> str:
        return self._call.client

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        self.whole = body
        self._call.respond(status, headers, body)

    def start(self, status: int, headers: Headers) -> None:
        self._call.start(status, headers)

    def write(self, data: bytes) -> None:
        self._failures.call(NAME, self.stream.add, data)
        self._call.write(data)

    def finish(self, data: bytes) -> None:
        self._failures.call(NAME, self.stream.add, data)
        self._call.finish(data)

    def answer(self) -> Any:
        """JSON-ready."""
        return _json_or_text(self.whole) if self.whole else self.stream.as_json()


class JoinedStream:
    """What the chunks of a stream come to. Only text is kept, up to MAX_BYTES characters."""

    def __init__(self) -> None:
        self.truncated = False
        self._choices: dict[int, dict[str, Any]] = {}
        self._more: dict[str, Any] = {}
        self._num_chars = 0

    def add(self, data: bytes) -> None:
        """Whole server-sent events."""
        for event in data.split(b"\n\n"):
            if event.startswith(b"data: {"):
                self._add_chunk(orjson.loads(event[6:]))

    def as_json(self) -> dict[str, Any]:
        return {"choices": [_listed(self._choices[index]) for index in sorted(self._choices)], **self._more}

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        self._more.update({key: chunk[key] for key in ("usage", "error") if chunk.get(key)})
        for choice in chunk.get("choices", ()):
            joined = self._choices.setdefault(choice["index"], {"index": choice["index"]})
            self._join(joined, {"text": choice.get("text"), **choice.get("delta", {})})
            if choice.get("finish_reason"):
                joined["finish_reason"] = choice["finish_reason"]

    def _join(self, joined: dict[str, Any], parts: dict[str, Any]) -> None:
        """Text is appended, objects and numbered lists of them (tool calls) are joined within."""
        for key, part in parts.items():
            if isinstance(part, str):
                if key in ("role", "id", "type", "name"):
                    joined[key] = part
                    continue
                self._num_chars += len(part)
                self.truncated = self.truncated or self._num_chars > MAX_BYTES
                if not self.truncated:
                    joined[key] = joined.get(key, "") + part
            elif isinstance(part, dict):
                self._join(joined.setdefault(key, {}), part)
            elif isinstance(part, list) and all(isinstance(one, dict) and "index" in one for one in part):
                for one in part:
                    self._join(joined.setdefault(key, {}).setdefault(one["index"], {}), one)


class BodyLog:
    """``note`` is called on the event loop's thread, and does not wait for the disk."""

    def __init__(self, path: Path, max_bytes: int, failures: ListenerFailures) -> None:
        """``max_bytes``: of both files together. Raises OSError."""
        self._path, self._old, self._most = path, path.with_name(f"{path.name}.1"), max_bytes // 2
        require_private("the log of requests and answers", [self._path, self._old])
        self._file, self._size = self._open()
        self._failures = failures
        failures.counts[NAME] += 0
        self._calls: dict[Call, RecordedCall] = {}
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write_all, name=NAME, daemon=True)
        self._thread.start()

    def record(self, call: Call) -> RecordedCall:
        """Return what is to be answered instead of the call."""
        self._calls[call] = RecordedCall(call, self._failures)
        return self._calls[call]

    def closed(self, call: Call, request_id: str = "", status: str = "") -> None:
        """The call is over. Without an id there was no exchange, and ``refused`` has written it."""
        recorded = self._calls.pop(call, None)
        if recorded is not None and request_id:
            self._put(
                call, request_id, status, recorded.request, recorded.answer(), recorded.stream.truncated
            )

    def refused(self, call: Call, request_id: str, status: int, body: bytes) -> None:
        """It got this error at once."""
        self._put(
            call, request_id, str(status), bytes(call.body[: MAX_BYTES + 1]), _json_or_text(body), False
        )

    def close(self) -> None:
        """Writes what waits."""
        self._lines.put(None)
        self._thread.join(10)
        os.close(self._file)

    def _put(
        self, call: Call, request_id: str, status: str, request: bytes, answer: Any, truncated: bool
    ) -> None:
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": request_id,
            "endpoint": call.endpoint,
            "tenant": call.account.tenant,
            "status": status,
            "request": _without_secrets(_json_or_text(request[:MAX_BYTES])),
            "answer": answer,
        }
        if truncated or len(request) > MAX_BYTES:
            fields["truncated"] = True
        line = OUR_KEY.sub(REDACTED.encode(), orjson.dumps(fields) + b"\n")
        if len(key := bearer(call.headers.get(b"authorization", b""))) >= MIN_KEY_CHARS:
            line = line.replace(key, REDACTED.encode())
        with self._lock:
            if self._pending + len(line) > MAX_PENDING_BYTES:
                raise BlockingIOError(
                    f"the disk of --log-bodies is too slow: {MAX_PENDING_BYTES >> 20} MiB wait to be written"
                )
            self._pending += len(line)
        self._lines.put(line)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except OSError as error:
                self._failures.note(NAME, error)
            with self._lock:
                self._pending -= len(line)

    def _write(self, line: bytes) -> None:
        if self._size and self._size + len(line) > self._most:
            self._path.replace(self._old)
            os.close(self._file)
            self._file, self._size = self._open()
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, self._size)  # no half lines
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._size += len(line)

    def _open(self) -> tuple[int, int]:
        file = private(str(self._path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        return file, os.fstat(file).st_size


def body_log_of(settings: RecordSettings, number: int | None, failures: ListenerFailures) -> BodyLog | None:
    """Open the log of --log-bodies, if there is one; ``number``: of this process, where there are several.

    Raises OpenToOthers or CannotStart.
    """
    if (path := settings.log_bodies) is None:
        return None
    own = path if number is None else path.with_name(f"{path.name}-{number}")
    try:
        return BodyLog(own, MAX_FILE_BYTES, failures)
    except OpenToOthers:
        raise
    except OSError as error:
        why = f"cannot write {own} ({error.strerror or error}); name a file in a folder that is there"
        raise CannotStart(f"--log-bodies: {why}") from error


def _json_or_text(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")


def _listed(choice: dict[str, Any]) -> dict[str, Any]:
    """Lists that came in pieces by number, such as tool calls, as lists."""
    numbered = {
        key: value
        for key, value in choice.items()
        if isinstance(value, dict) and all(isinstance(n, int) for n in value)
    }
    return {**choice, **{key: [value[n] for n in sorted(value)] for key, value in numbered.items()}}


def _without_secrets(request: Any) -> Any:
    if not isinstance(request, dict):
        return request
    return {name: REDACTED if SECRET_FIELD.match(name) else value for name, value in request.items()}
