"""A store for KV blocks behind the caches of all workers that are given it, and of those that come after.

    PLACE/kv-<model, version, key>/<2 digits of the hash>/<hash>      nonce | sealed block

AES-GCM under a key that follows from the cluster's binds a block to its hash and its model: one that was cut
short, changed, or put under another's name does not open. It is removed, and computed. The place is a folder
(``kv_folder``) or a bucket of an object store (``kv_bucket``). No error there ends a request, and one that
hangs stalls neither the loop nor the process's end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from hashlib import blake2b
from types import MappingProxyType
from typing import Protocol

import msgspec
import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from .. import __version__
from ..transport.handoff.protocol import Key
from ..transport.messages.messages import ModelIdentity
from ..transport.movers.block_memory import BlockPool, memory_of
from .parts import ReadingCore
from .threads import Threads

NONCE_BYTES = 12
TAG_BYTES = 16
MAX_QUEUED_GROUPS = 16  # to be written
MAX_KNOWN = 1 << 16  # hashes, which take up to 20 MB of memory
WARN_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class Storage(Protocol):
    """Named blobs. All but ``open`` may take its time and raise OSError; none is called by the loop."""

    @property
    def num_readers(self) -> int:
        """Threads that ``get``."""

    @property
    def num_writers(self) -> int:
        """Threads that ``put``."""

    @property
    def group_bytes(self) -> int:
        """How much one thread reads or writes, blob by blob, as one group: at least one."""

    @property
    def ahead(self) -> int:
        """Groups that a prompt has read at a time."""

    @property
    def max_known(self) -> int:
        """Blobs that a worker may take for there, and not ``touch``; 0: a touch keeps them there."""

    def open(self, folder: str) -> None:
        """Make ready for names that begin with ``folder``/. Raises KVStoreError with what to do."""

    def trim(self) -> None:
        """Remove what is over a limit, before anything is written."""

    def get(self, name: str, num_bytes: int) -> bytes | None:
        """Return the blob; None: there is none. Not all of it need come if it has another size."""

    def touch(self, name: str) -> bool:
        """Note that the blob is in use. Return whether it is there."""

    def put(self, name: str, blob: bytes) -> None:
        """Write a blob, as a whole or not at all."""

    def remove(self, name: str) -> None: ...

    def close(self) -> None:
        """End what runs, as far as possible: it fails."""


class KnownHashes:
    """Hashes whose blobs were there when this worker last wrote, read or touched them: up to ``limit``, the
    latest ones. For all threads."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()  # the latest last; a dict pops the first slowly

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._known

    def note(self, block_hash: bytes, is_there: bool) -> None:
        with self._lock:
            self._known.pop(block_hash, None)
            if is_there:
                self._known[block_hash] = None
                if len(self._known) > self._limit:
                    self._known.popitem(last=False)


class KVStore:
    """The blocks of one model in ``storage``, read and written by threads of its own; each method is for one
    thread, and ``wake`` is called from any when one of them has more to do."""

    gauges: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self, storage: Storage, secret: bytes, model: ModelIdentity, pool: BlockPool, wake: Callable[[], None]
    ) -> None:
        """``secret``: the cluster's; empty: it has none. Raises KVStoreError."""
        key = blake2b(secret, digest_size=32, person=b"splitserve kv").digest()
        same = (msgspec.structs.replace(model, revision=""), __version__)  # else the bits may differ
        self._model = blake2b(msgspec.msgpack.encode(same), digest_size=8, key=key).digest()
        self._storage, self._folder = storage, f"kv-{self._model.hex()}"
        storage.open(self._folder)
        self._cipher = AESGCM(key)
        self._memory, self._layers = memory_of(pool), slice(0, pool.shape[1])
        self._stream = None  # of a GPU: the default one would wait for the steps that run
        if (device := self._memory.device).type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._block_bytes, self._wake = model.block_bytes, wake
        self.group, self.ahead = max(1, storage.group_bytes // model.block_bytes), storage.ahead
        self._known = KnownHashes(storage.max_known)
        self._reads: dict[Key, deque[Future[list[bytes]]]] = {}  # in their order
        self._writes: list[Future[int]] = []
        self._readers, self._writer = Threads(storage.num_readers), Threads(storage.num_writers)
        self._num_saved = 0
        self._warned_at = float("-inf")
        self._writer.submit(self._trim)

    @property
    def counters(self) -> dict[str, float]:
        """See ``transport.reports.Telemetry``."""
        self._settle_writes()
        return {"saved_blocks": self._num_saved}

    @property
    def takes_writes(self) -> bool:
        """Whether the next group may be written."""
        self._settle_writes()
        return len(self._writes) < MAX_QUEUED_GROUPS

    def knows(self, block_hash: bytes) -> bool:
        """Whether the block need not be written: this worker believes that it is there."""
        return block_hash in self._known

    def write(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy these blocks now, and write them soon. They are final."""
        packed = self._memory.pack(blocks, self._layers)
        with torch.cuda.stream(self._stream):  # no effect if it is None
            copied = packed.cpu().numpy().reshape(len(blocks), -1)
        future = self._writer.submit(self._write_group, list(hashes), copied)
        self._writes.append(future)
        future.add_done_callback(lambda _: self._wake())

    def _settle_writes(self) -> None:
        done = [future for future in self._writes if future.done()]
        if done:
            self._num_saved += sum(future.result() for future in done)
            self._writes = [future for future in self._writes if future not in done]

    def read(self, key: Key, hashes: Sequence[bytes]) -> None:
        """Read the leading ones of these blocks that are there, and ``report`` them under ``key``."""
        future = self._readers.submit(self._read_group, list(hashes))
        self._reads.setdefault(key, deque()).append(future)
        future.add_done_callback(lambda _: self._wake())

    def report(self, core: ReadingCore) -> None:
        """Give the core what has been read, for each key in the order of its reads: a group a turn, for the
        loop has sequences to go on with."""
        for key, futures in list(self._reads.items()):
            if not futures[0].done():
                continue
            found = futures.popleft().result()
            blocks = core.arrived(key, len(found))
            if not blocks:  # it needs no more
                for future in futures:
                    future.cancel()
                futures.clear()
            if not futures:
                del self._reads[key]
            if blocks:
                data = torch.frombuffer(bytearray().join(found), dtype=torch.uint8)
                with torch.cuda.stream(self._stream):
                    data = data.to(self._memory.device)
                self._memory.unpack(data, blocks, self._layers)
                core.filled(key, len(found))
                self._wake()
                return

    def close(self) -> None:
        """Forget what has not been read or written yet."""
        self._wake, self._warned_at = lambda: None, float("inf")  # what hangs may end later
        for threads in (self._readers, self._writer):
            threads.stop()
        self._storage.close()
        for threads in (self._readers, self._writer):
            threads.join()

    # --- on the threads --------------------------------------------------------------------------

    def _trim(self) -> None:
        with suppress(OSError):
            self._storage.trim()

    def _read_group(self, hashes: list[bytes]) -> list[bytes]:
        found: list[bytes] = []
        for block_hash in hashes:
            if (block := self._read_block(block_hash)) is None:
                break
            found.append(block)
        return found

    def _read_block(self, block_hash: bytes) -> bytes | None:
        name = self._name(block_hash)
        try:
            blob = self._storage.get(name, NONCE_BYTES + self._block_bytes + TAG_BYTES)
            if blob is None:
                self._known.note(block_hash, is_there=False)
                return None
            sealed = memoryview(blob)  # a copy would be made under Python's lock
            block = self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], self._model + block_hash)
            if len(block) != self._block_bytes:
                raise InvalidTag
            self._known.note(block_hash, is_there=True)
            return block
        except (InvalidTag, ValueError):
            self._warn(f"{self._storage}/{name} is damaged: it is removed")
            with suppress(OSError):
                self._storage.remove(name)
            self._known.note(block_hash, is_there=False)
        except OSError as error:
            self._warn(f"cannot read {self._storage}/{name}: {error.strerror}")
        return None

    def _write_group(self, hashes: list[bytes], blocks: NDArray[np.uint8]) -> int:
        """Return how many were not there."""
        num_new = 0
        try:
            for block_hash, block in zip(hashes, blocks, strict=True):
                if not self._storage.touch(name := self._name(block_hash)):
                    nonce = os.urandom(NONCE_BYTES)
                    sealed = self._cipher.encrypt(nonce, block.data, self._model + block_hash)
                    self._storage.put(name, nonce + sealed)
                    num_new += 1
                self._known.note(block_hash, is_there=True)
        except OSError as error:
            self._warn(f"cannot write to {self._storage}/{self._folder}: {error.strerror}")
        return num_new

    def _name(self, block_hash: bytes) -> str:
        digits = block_hash.hex()
        return f"{self._folder}/{digits[:2]}/{digits}"

    def _warn(self, what: str) -> None:
        if time.monotonic() - self._warned_at >= WARN_EVERY_S:
            self._warned_at = time.monotonic()
            _log.warning("the KV store: %s (said at most once a minute; blocks are computed instead)", what)
