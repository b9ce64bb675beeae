"""The KV store: a block comes back as it was written, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from splitserve.engine.errors import KVStoreError
from splitserve.transport.handoff.protocol import Key
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import ModelIdentity
from splitserve.worker import kv_store
from splitserve.worker.kv_store import KVStore

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
    """Stores over pools of the same size; ``written`` is what the first one's held."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.woken = folder, threading.Event()
        self.pool = np.random.default_rng(1).integers(0, 255, (NUM_BLOCKS, 2, BLOCK_BYTES // 2), np.uint8)
        self.written = [block.tobytes() for block in self.pool]
        self._open = ExitStack()

    def store(self, secret: bytes = b"s", model: ModelIdentity = MODEL, max_bytes: int = 1 << 30) -> KVStore:
        made = KVStore(self.folder, max_bytes, secret, model, self.pool, self.woken.set)
        self._open.callback(made.close)
        return made

    def write(self, store: KVStore, *blocks: int) -> None:
        """Write these blocks, and wait until all that was ordered has been written."""
        store.write([HASHES[block] for block in blocks], blocks)
        self.wait_written(store)

    def wait_written(self, store: KVStore) -> None:
        store._writer.submit(lambda: None).result(60)

    def read(self, store: KVStore, *blocks: int) -> list[bytes]:
        """What comes of these."""
        reader = Reader(self)
        store.read(KEY, [HASHES[block] for block in blocks])
        while not reader.found:
            assert self.woken.wait(60)
            self.woken.clear()
            store.report(reader)
        return reader.found[0][1]

    def file_of(self, block: int) -> Path:
        (path,) = self.folder.glob(f"kv-*/*/{HASHES[block].hex()}")
        return path

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "new" / "store")
    yield made
    made.close()


def test_blocks_come_back_also_to_another_worker_and_after_a_restart(rig: Rig) -> None:
    store = rig.store()
    rig.write(store, 0, 1, 2)
    assert rig.read(store, 0, 1, 2) == rig.written[:3]
    assert rig.read(rig.store(), 0, 1, 2) == rig.written[:3]
    store.close()
    assert rig.read(rig.store(), 1, 2) == rig.written[1:3]
    assert store.counters == {"saved_blocks": 3}


def test_what_is_written_is_copied_at_once(rig: Rig) -> None:
    store = rig.store()
    store.write(HASHES[:1], [0])
    rig.pool[0] = 0
    rig.wait_written(store)
    assert rig.read(store, 0) == rig.written[:1]


def test_a_turn_of_the_loop_copies_one_group_and_another_follows(rig: Rig) -> None:
    store, reader = rig.store(), Reader(rig)
    rig.write(store, 0, 1, 2)
    for block in range(3):
        store.read(KEY, HASHES[block : block + 1])
    for _, future in store._reads:
        future.result(60)
    for turn in range(3):
        rig.woken.clear()
        store.report(reader)
        assert [found for _, found in reader.found] == [[block] for block in rig.written[: turn + 1]]
        assert rig.woken.is_set()


def test_only_the_leading_blocks_that_are_there_come(rig: Rig) -> None:
    store = rig.store()
    rig.write(store, 0, 1, 3)
    assert rig.read(store, 0, 1, 2, 3) == rig.written[:2]
    assert rig.read(store, 2, 3) == []


@pytest.mark.parametrize("damage", ["a bit", "cut short", "empty", "another block", "longer"])
def test_a_damaged_file_is_a_miss_and_is_removed(rig: Rig, damage: str) -> None:
    store = rig.store()
    rig.write(store, 0, 1)
    path = rig.file_of(0)
    sealed = bytearray(path.read_bytes())
    if damage == "a bit":
        sealed[500] ^= 1
    elif damage == "cut short":
        del sealed[500:]
    elif damage == "empty":
        sealed.clear()
    elif damage == "another block":
        sealed[:] = rig.file_of(1).read_bytes()
    else:
        sealed += b"x"
    path.write_bytes(sealed)
    assert rig.read(store, 0) == []
    assert not path.exists()
    rig.write(store, 0)
    assert rig.read(store, 0) == rig.written[:1]


def test_another_key_model_or_version_reads_nothing_and_a_revision_does(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.write(rig.store(), 0)
    for change in ({"kv_name": "n"}, {"numerics": "exact"}, {"dtype": "g"}, {"block_size": 8}):
        assert rig.read(rig.store(model=replace(MODEL, **change)), 0) == []
    assert rig.read(rig.store(model=replace(MODEL, revision="other")), 0) == rig.written[:1]
    assert rig.read(rig.store(secret=b"another"), 0) == []
    assert rig.read(rig.store(), 0) == rig.written[:1], "what does not open for others stays"
    monkeypatch.setattr(kv_store, "__version__", "9.9")
    assert rig.read(rig.store(), 0) == []


def test_nothing_is_stored_in_the_clear_nor_for_other_users(rig: Rig) -> None:
    rig.pool[0] = 65
    rig.write(rig.store(), 0)
    assert b"AAAA" not in rig.file_of(0).read_bytes()
    folder = rig.file_of(0).parent.parent
    assert folder.stat().st_mode & 0o077 == 0


def test_over_its_limit_the_folder_loses_what_was_used_longest_ago(rig: Rig) -> None:
    foreign = rig.folder / "kv-mine" / "ab" / "precious"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(bytes(1 << 20))
    os.utime(foreign, (1, 1))
    store = rig.store(max_bytes=20 * BLOCK_BYTES)
    rig.write(store, *range(10))
    for block in range(10):
        os.utime(rig.file_of(block), (block + 2, block + 2))
    rig.read(store, 0)  # used now
    rig.write(store, *range(10, 20))
    size = sum(path.stat().st_size for path in rig.folder.glob("kv-*/??/" + "?" * 32))
    assert size <= 20 * BLOCK_BYTES
    assert rig.read(store, 0) == rig.written[:1]
    assert rig.read(store, 1) == []
    assert foreign.exists()


def test_a_full_disk_costs_blocks_and_nothing_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = rig.store()

    def fails(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fails)
        for _ in range(2 * kv_store.MAX_QUEUED_GROUPS):
            rig.write(store, 0)
    assert store.takes_writes
    assert [record.message for record in caplog.records if "No space left" in record.message][1:] == []
    assert "No space left" in caplog.text
    assert not list(rig.folder.glob("kv-*/??/*"))
    rig.write(store, 0)
    assert rig.read(store, 0) == rig.written[:1]


def test_a_disk_that_is_full_before_the_limit_takes_new_blocks_for_the_oldest(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, write = rig.store(), Path.write_bytes

    def takes_16(self: Path, data: bytes) -> int:
        if len(list(rig.folder.glob("kv-*/??/*"))) >= 16:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", takes_16)
    for block in range(18):
        rig.write(store, block)
        with suppress(ValueError):
            os.utime(rig.file_of(block), (block + 2, block + 2))
    assert rig.read(store, 0) == []
    assert rig.read(store, 5, 6) == rig.written[5:7]
    assert rig.read(store, 17) == rig.written[17:18]


def test_a_folder_that_may_only_be_read_is_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    store = rig.store()
    rig.write(store, 0)

    def fails(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", fails)
    assert rig.read(store, 0) == rig.written[:1]


HANGS = """
import sys, threading
from pathlib import Path
from worker.test_kv_store import HASHES, KEY, Rig

rig, begun = Rig(Path(sys.argv[1])), threading.Event()
Path.read_bytes = lambda path: begun.set() or threading.Event().wait()
rig.store().read(KEY, HASHES[:1])
begun.wait()
rig.close()
"""


@pytest.mark.timeout(150)
def test_a_disk_that_hangs_keeps_no_process_from_its_end(tmp_path: Path) -> None:
    tests = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", HANGS, str(tmp_path)], cwd=tests, check=True, timeout=100)


def test_a_folder_that_goes_away_is_a_miss(rig: Rig) -> None:
    store = rig.store()
    rig.write(store, 0)
    shutil.rmtree(rig.folder)
    assert rig.read(store, 0) == []
    rig.write(store, 0)
    assert rig.read(store, 0) == []


def test_no_more_is_queued_than_a_disk_takes(rig: Rig) -> None:
    store, gate = rig.store(), threading.Event()
    store._writer.submit(gate.wait, 60)
    num_queued = 0
    while store.takes_writes:
        store.write(HASHES[:1], [0])
        num_queued += 1
    assert num_queued == kv_store.MAX_QUEUED_GROUPS
    rig.woken.clear()
    gate.set()
    assert rig.woken.wait(60)
    rig.wait_written(store)
    assert store.takes_writes


def test_a_folder_that_cannot_be_made_is_an_error(rig: Rig) -> None:
    rig.folder.parent.mkdir(parents=True)
    rig.folder.write_text("a file")
    with pytest.raises(KVStoreError, match=r"^--kv-store .*store: .*; give a folder to write to$"):
        rig.store()
