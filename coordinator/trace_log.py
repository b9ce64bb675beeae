"""The load that was, as a trace to plan with: arrivals, lengths, and which prompts begin alike. Never text, never a name.

A file is in splitserve's own trace format (docs/planning.md), one row for each sequence, written when it ends. Its block hashes are keyed
with a secret that is drawn at the start and kept nowhere: within a file equal hashes mean equal tokens (of one tenant's salt), and nobody
can find out by guessing which. Sessions are hashed with it too.
"""

from __future__ import annotations

import os
import secrets
import time
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import orjson

from ..transport.block_hash import chain, root_hash
from ..transport.messages import u32
from .request import Ended, GenerationRequest
from .token_times import TimedSink

BLOCK_SIZE = 64
"""Tokens of a hashed block: finer ones than the workers' would say no more, coarser ones keep the file small."""
HASH_DIGITS = 16


class TraceLog:
    """A listener of the dispatcher. One file a process and start: ``requests-TIME-PID.jsonl`` in ``folder``, which is made."""

    def __init__(self, folder: Path, longest_request_s: float) -> None:
        """``longest_request_s``: no request ends later after its arrival. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._began, origin_s = time.monotonic(), time.time()
        self._secret = secrets.token_bytes(16)
        self._root = secrets.token_hex(16)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(origin_s))
        self.path = folder / f"requests-{stamp}-{os.getpid()}.jsonl"
        self._file: BinaryIO = self.path.open("xb", buffering=0)  # a row is whole or absent, also when the process is killed
        header = {"block_size": BLOCK_SIZE, "origin_s": origin_s, "disorder_s": longest_request_s + 60.0}
        self._file.write(orjson.dumps({"format": "splitserve-trace", "version": 1, **header}) + b"\n")

    def note(self, request: GenerationRequest, ended: Ended) -> None:
        """A sequence is over. One that never had a token was no load that could be simulated."""
        if ended.num_output_tokens < 1:
            return
        row: dict[str, object] = {
            "arrival_s": round(max(0.0, request.arrival - self._began), 6),
            "num_prompt_tokens": len(request.prompt_token_ids),
            "num_output_tokens": ended.num_output_tokens,
        }
        hashes = chain(root_hash(self._root, request.salt), u32(request.prompt_token_ids), BLOCK_SIZE)
        if hashes:
            row["block_hashes"] = [one.hex()[:HASH_DIGITS] for one in hashes]
        if request.session:
            row["session"] = blake2b(request.session.encode(), key=self._secret, digest_size=8).hexdigest()
        if isinstance(request.sink, TimedSink):
            row["token_times_s"] = [round(max(0.0, at - request.arrival), 6) for at in request.sink.times]
        self._file.write(orjson.dumps(row) + b"\n")

    def close(self) -> None:
        self._file.close()
