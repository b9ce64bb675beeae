"""The load that was, as a trace to plan with: arrivals, lengths, and which prompts begin alike. Never text,
never a name.

A file is in splitserve's own trace format (docs/planning.md), one row for each sequence, written when it
ends. Its block hashes are keyed with a secret that is drawn at the start and kept nowhere: within a file
equal hashes mean equal tokens (of one tenant's salt), and nobody can find out by guessing which. Sessions are
hashed with it too.

While its disk is full rows are lost, and nothing else; the log and ``splitserve_listener_failures_total``
report it.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import BinaryIO

import orjson

from ...transport.messages.blocks import chain, root_hash
from ...transport.messages.messages import TokenLogprobs, u32
from ...transport.process.private_files import private
from ..full_disk import is_full
from ..lifecycle.request import Ended, Request, Sink

BLOCK_SIZE = 64
"""Tokens of a hashed block: smaller than the workers' would add nothing, larger ones keep the file small."""
HASH_DIGITS = 16
_log = logging.getLogger(__name__)


class TraceLog:
    """A listener of the dispatcher. One file a process and start: ``requests-TIME-PID.jsonl`` in ``folder``,
    which is made."""

    def __init__(self, folder: Path, longest_request_s: float) -> None:
        """``longest_request_s``: longest time of any request. Raises OSError, except for a full disk."""
        self._began, origin_s = time.monotonic(), time.time()
        self._secret = secrets.token_bytes(16)
        self._root = secrets.token_hex(16)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(origin_s))
        self.path = folder / f"requests-{stamp}-{os.getpid()}.jsonl"
        self._header = {
            "block_size": BLOCK_SIZE,
            "origin_s": origin_s,
            "disorder_s": longest_request_s + 60.0,
        }
        self._file: BinaryIO | None = None
        self._size = 0
        try:
            self._open()
        except OSError as error:
            if not is_full(error):
                raise
            _log.error(
                "--trace-folder: there is no space for %s; requests are traced once there is", self.path
            )

    def note(self, request: Request, ended: Ended) -> None:
        """A sequence is over. One that never had a token was no load that could be simulated, and a shadow's
        is no load of clients."""
        if ended.num_output_tokens < 1 or request.is_copy:
            return
        row: dict[str, object] = {
            "arrival_s": round(max(0.0, request.arrival - self._began), 6),
            "num_prompt_tokens": len(request.prompt_token_ids),
            "num_output_tokens": ended.num_output_tokens,
        }
        hashes = chain(
            root_hash(self._root, request.salt, request.adapter), u32(request.prompt_token_ids), BLOCK_SIZE
        )
        if hashes:
            row["block_hashes"] = [one.hex()[:HASH_DIGITS] for one in hashes]
        if request.session:
            row["session"] = blake2b(request.session.encode(), key=self._secret, digest_size=8).hexdigest()
        if isinstance(request.sink, TimedSink):
            row["token_times_s"] = [round(max(0.0, at - request.arrival), 6) for at in request.sink.times]
        if self._file is None:
            self._open()
        self._write(orjson.dumps(row) + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        """Begins the file. Raises OSError, and leaves none."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # unbuffered: a row is whole or absent, also when the process is killed
        self._file = open(self.path, "xb", buffering=0, opener=private)  # noqa: SIM115
        try:
            self._write(orjson.dumps({"format": "splitserve-trace", "version": 1, **self._header}) + b"\n")
        except OSError:
            self._file.close()
            self._file = None
            self.path.unlink()
            raise

    def _write(self, row: bytes) -> None:
        """All of it or nothing. Raises OSError with the file's path."""
        assert self._file is not None
        try:
            if self._file.write(row) != len(row):  # the last bytes of a disk
                os.ftruncate(self._file.fileno(), self._size)
                os.lseek(self._file.fileno(), self._size, os.SEEK_SET)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            error.filename = str(self.path)
            raise
        self._size += len(row)


class TimedSink:
    """A ``Sink`` that notes, for --trace-token-times, the time of each token and hands all on. ``times``:
    monotonic seconds."""

    __slots__ = ("_sink", "flush", "times")

    def __init__(self, sink: Sink) -> None:
        self._sink, self.flush = sink, sink.flush
        self.times: list[float] = []

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.times.append(monotonic())
        self._sink.push(token_id, logprobs)

    def push_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self._sink.push_prompt_logprobs(logprobs)

    def end(self, ended: Ended) -> None:
        self._sink.end(ended)
