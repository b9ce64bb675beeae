"""A folder for KV blocks behind the caches of all workers that are given it, and of those that come after.

    FOLDER/kv-<model, version, key>/<2 digits of the hash>/<hash>      nonce | sealed block

AES-GCM under a key that follows from the cluster's binds a block to its hash and its model: one that was cut
short, changed, or put under another's name does not open. It is removed, and computed. When the folder is
over its limit, or its disk is full, what was written or read longest ago is removed first. No error here ends
a request, and a disk that hangs neither the loop nor the process.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from .. import __version__
from ..engine.errors import KVStoreError
from ..transport.handoff.protocol import Key
from ..transport.messages.messages import ModelIdentity
from ..transport.movers.block_memory import BlockPool, memory_of
from .parts import ReadingCore

NONCE_BYTES = 12
GROUP_BYTES = 2 << 20  # read or written at a time: a loop copies them in 0.2 ms
MAX_QUEUED_GROUPS = 16  # to be written
NUM_READERS = 4
STOP_S = 1.0  # for the file that a thread has begun
WARN_EVERY_S = 60.0
_BLOCK = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]+)?")  # or one that is being written
_log = logging.getLogger(__name__)


class Threads:
    """Run one call after the other. They may hang: unlike those of ``concurrent.futures``, they keep no
    process from its end."""

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], Sequence[Any]] | None] = SimpleQueue()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, name="kv-store", daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, call, args))
        return future

    def stop(self) -> None:
        """Forget the calls that have not begun."""
        self._stopped = True
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(STOP_S)

    def _run(self) -> None:
        while (work := self._calls.get()) is not None and not self._stopped:
            future, call, args = work
            future.set_result(call(*args))


class KVStore:
    """The blocks of one model in ``folder``. Files are read and written by threads of its own; each method is
    for one thread, and ``wake`` is called from any when one of them has more to do."""

    gauges: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        secret: bytes,
        model: ModelIdentity,
        pool: BlockPool,
        wake: Callable[[], None],
    ) -> None:
        """``max_bytes``: of the whole folder. ``secret``: the cluster's; empty: it has none. Raises
        KVStoreError."""
        key = blake2b(secret, digest_size=32, person=b"splitserve kv").digest()
        same = (msgspec.structs.replace(model, revision=""), __version__)  # else the bits may differ
        self._model = blake2b(msgspec.msgpack.encode(same), digest_size=8, key=key).digest()
        self._root, self._folder = folder, folder / f"kv-{self._model.hex()}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise KVStoreError(f"--kv-store {folder}: {error.strerror}; give a folder to write to") from None
        self._cipher = AESGCM(key)
        self._memory, self._layers = memory_of(pool), slice(0, pool.shape[1])
        self._stream = None  # of a GPU: the default one would wait for the steps that run
        if (device := self._memory.device).type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._block_bytes, self._max_bytes, self._wake = model.block_bytes, max_bytes, wake
        self.group = max(1, GROUP_BYTES // model.block_bytes)
        self._reads: deque[tuple[Key, Future[list[bytes]]]] = deque()  # in their order
        self._readers, self._writer = Threads(NUM_READERS), Threads(1)
        self._num_queued = 0
        self._num_saved = self._num_untrimmed = 0
        self._warned_at = float("-inf")
        self._writer.submit(self._trim)

    @property
    def counters(self) -> dict[str, float]:
        """See ``transport.reports.Telemetry``."""
        return {"saved_blocks": self._num_saved}

    @property
    def takes_writes(self) -> bool:
        """Whether the next group may be written."""
        return self._num_queued < MAX_QUEUED_GROUPS

    def write(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy these blocks now, and write them soon. They are final."""
        packed = self._memory.pack(blocks, self._layers)
        with torch.cuda.stream(self._stream):  # no effect if it is None
            copied = packed.cpu().numpy().reshape(len(blocks), -1)
        self._num_queued += 1
        self._writer.submit(self._write_group, list(hashes), copied)

    def read(self, key: Key, hashes: Sequence[bytes]) -> None:
        """Read the leading ones of these blocks that are there, and ``report`` them under ``key``."""
        future = self._readers.submit(self._read_group, list(hashes))
        self._reads.append((key, future))
        future.add_done_callback(lambda _: self._wake())

    def report(self, core: ReadingCore) -> None:
        """Give the core what has been read, in the order of the reads: a group a turn, for the loop has
        sequences to go on with."""
        while self._reads and self._reads[0][1].done():
            key, future = self._reads.popleft()
            found = future.result()
            if blocks := core.arrived(key, len(found)):
                data = torch.frombuffer(bytearray().join(found), dtype=torch.uint8)
                with torch.cuda.stream(self._stream):
                    data = data.to(self._memory.device)
                self._memory.unpack(data, blocks, self._layers)
                core.filled(key, len(found))
                self._wake()
                return

    def close(self) -> None:
        """Forget what has not been read or written yet."""
        self._wake = lambda: None  # what hangs may end later
        for threads in (self._readers, self._writer):
            threads.stop()

    # --- on the threads --------------------------------------------------------------------------

    def _read_group(self, hashes: list[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for block_hash in hashes:
            if (block := self._read_block(block_hash)) is None:
                break
            found.append(block)
        return found

    def _read_block(self, block_hash: bytes) -> bytes | None:
        path = self._path(block_hash)
        try:
            sealed = memoryview(path.read_bytes())  # a copy would be made under Python's lock
            block = self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], self._model + block_hash)
            if len(block) != self._block_bytes:
                raise InvalidTag
            with suppress(OSError):  # it may be read only
                os.utime(path)
            return block
        except FileNotFoundError:
            return None
        except (InvalidTag, ValueError):
            self._warn(f"{path} is damaged: it is removed")
            with suppress(OSError):
                path.unlink()
        except OSError as error:
            self._warn(f"cannot read {path}: {error.strerror}")
        return None

    def _write_group(self, hashes: list[bytes], blocks: NDArray[np.uint8]) -> None:
        try:
            for block_hash, block in zip(hashes, blocks, strict=True):
                self._write_block(block_hash, block)
            if self._num_untrimmed > self._max_bytes // 64:
                self._trim()
        except OSError as error:
            self._warn(f"cannot write to {self._folder}: {error.strerror}")
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._trim(is_full=True)
        finally:
            self._num_queued -= 1
            self._wake()

    def _write_block(self, block_hash: bytes, block: NDArray[np.uint8]) -> None:
        path = self._path(block_hash)
        with suppress(FileNotFoundError):
            os.utime(path)
            return
        nonce = os.urandom(NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, block.data, self._model + block_hash)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{nonce.hex()}")
        try:
            unfinished.write_bytes(sealed)
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        self._num_saved += 1
        self._num_untrimmed += len(sealed)

    def _trim(self, is_full: bool = False) -> None:
        """Remove the oldest files of all models until an eighth of the limit is free; ``is_full``: an eighth
        of them."""
        self._num_untrimmed, files = 0, []
        with suppress(OSError):  # a folder has gone
            for path in self._root.glob("kv-*/??/*"):
                with suppress(OSError):  # another worker has removed it
                    if _BLOCK.fullmatch(path.name):
                        status = path.stat()
                        files.append((status.st_mtime, status.st_size, path))
        held = sum(size for _, size, _ in files)
        limit = held if is_full else self._max_bytes
        if held < limit or not files:
            return
        excess = held - limit + limit // 8
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            with suppress(OSError):
                path.unlink(missing_ok=True)
                excess -= size

    def _path(self, block_hash: bytes) -> Path:
        digits = block_hash.hex()
        return self._folder / digits[:2] / digits

    def _warn(self, what: str) -> None:
        if time.monotonic() - self._warned_at >= WARN_EVERY_S:
            self._warned_at = time.monotonic()
            _log.warning("the KV store: %s (said at most once a minute; blocks are computed instead)", what)
