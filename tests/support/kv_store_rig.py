"""KV stores over pools of the same size, in a folder or in a bucket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from splitserve.transport.handoff.protocol import Key
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import ModelIdentity
from splitserve.worker.kv_bucket import KVBucket
from splitserve.worker.kv_folder import KVFolder
from splitserve.worker.kv_store import KVStore, Storage

BLOCK_BYTES, NUM_BLOCKS = 1024, 40
MODEL = ModelIdentity(
    kv_name="m", dtype="f", block_size=4, cache_map=states(2, BLOCK_BYTES // 2), block_bytes=BLOCK_BYTES
)
HASHES = [bytes([i]) * 16 for i in range(NUM_BLOCKS)]
KEY = (7, 1)


class Reader:
    """A core that has every block it is given filled, from the pool's end."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.found: list[tuple[Key, list[bytes]]] = []
        self._next = NUM_BLOCKS

    def arrived(self, key: Key, count: int) -> list[int]:
        self._next -= count
        self._blocks = list(range(self._next, self._next + count))
        if not count:
            self.found.append((key, []))
        return self._blocks

    def filled(self, key: Key, count: int) -> None:
        self.found.append((key, [self._rig.pool[block].tobytes() for block in self._blocks]))


class Rig:
    """``written`` is what the first store's pool held."""

    def __init__(self, storage: Callable[[], Storage]) -> None:
        self.storage, self.woken = storage, threading.Event()
        self.pool = np.random.default_rng(1).integers(0, 255, (NUM_BLOCKS, 2, BLOCK_BYTES // 2), np.uint8)
        self.written = [block.tobytes() for block in self.pool]
        self._open = ExitStack()

    def store(
        self, secret: bytes = b"s", model: ModelIdentity = MODEL, storage: Storage | None = None
    ) -> KVStore:
        made = KVStore(storage or self.storage(), secret, model, self.pool, self.woken.set)
        self._open.callback(made.close)
        return made

    def write(self, store: KVStore, *blocks: int) -> None:
        """Write these blocks, and wait until all that was ordered has been written."""
        store.write([HASHES[block] for block in blocks], blocks)
        self.wait_written(store)

    def wait_written(self, store: KVStore) -> None:
        assert not wait(store._writes, 60).not_done

    def read(self, store: KVStore, *blocks: int, key: Key = KEY) -> list[bytes]:
        """What comes of these."""
        reader = Reader(self)
        store.read(key, [HASHES[block] for block in blocks])
        while not reader.found:
            assert self.woken.wait(60)
            self.woken.clear()
            store.report(reader)
        return reader.found[0][1]

    def close(self) -> None:
        self._open.close()


def in_bucket(url: str) -> Rig:
    return Rig(lambda: KVBucket(url))


class FolderRig(Rig):
    def __init__(self, folder: Path) -> None:
        super().__init__(lambda: KVFolder(folder, 1 << 30))
        self.folder = folder

    def file_of(self, block: int) -> Path:
        (path,) = self.folder.glob(f"kv-*/*/{HASHES[block].hex()}")
        return path
