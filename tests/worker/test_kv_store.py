"""The KV store: a block comes back as it was written, or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.kv_store_rig import BLOCK_BYTES, HASHES, KEY, MODEL, FolderRig, Reader

from splitserve.engine.errors import KVStoreError
from splitserve.worker import kv_store
from splitserve.worker.kv_folder import KVFolder


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[FolderRig]:
    made = FolderRig(tmp_path / "new" / "store")
    yield made
    made.close()


def test_blocks_come_back_also_to_another_worker_and_after_a_restart(rig: FolderRig) -> None:
    store = rig.store()
    rig.write(store, 0, 1, 2)
    assert rig.read(store, 0, 1, 2) == rig.written[:3]
    assert rig.read(rig.store(), 0, 1, 2) == rig.written[:3]
    store.close()
    assert rig.read(rig.store(), 1, 2) == rig.written[1:3]
    assert store.counters == {"saved_blocks": 3}


def test_what_is_written_is_copied_at_once(rig: FolderRig) -> None:
    store = rig.store()
    store.write(HASHES[:1], [0])
    rig.pool[0] = 0
    rig.wait_written(store)
    assert rig.read(store, 0) == rig.written[:1]


def test_a_turn_of_the_loop_copies_one_group_and_another_follows(rig: FolderRig) -> None:
    store, reader = rig.store(), Reader(rig)
    rig.write(store, 0, 1, 2)
    for block in range(3):
        store.read(KEY, HASHES[block : block + 1])
    for future in store._reads[KEY]:
        future.result(60)
    for turn in range(3):
        rig.woken.clear()
        store.report(reader)
        assert [found for _, found in reader.found] == [[block] for block in rig.written[: turn + 1]]
        assert rig.woken.is_set()


def test_only_the_leading_blocks_that_are_there_come(rig: FolderRig) -> None:
    store = rig.store()
    rig.write(store, 0, 1, 3)
    assert rig.read(store, 0, 1, 2, 3) == rig.written[:2]
    assert rig.read(store, 2, 3) == []


@pytest.mark.parametrize("damage", ["a bit", "cut short", "empty", "another block", "longer"])
def test_a_damaged_file_is_a_miss_and_is_removed(rig: FolderRig, damage: str) -> None:
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
    rig: FolderRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.write(rig.store(), 0)
    for change in ({"kv_name": "n"}, {"numerics": "exact"}, {"dtype": "g"}, {"block_size": 8}):
        assert rig.read(rig.store(model=replace(MODEL, **change)), 0) == []
    assert rig.read(rig.store(model=replace(MODEL, revision="other")), 0) == rig.written[:1]
    assert rig.read(rig.store(secret=b"another"), 0) == []
    assert rig.read(rig.store(), 0) == rig.written[:1], "what does not open for others stays"
    monkeypatch.setattr(kv_store, "__version__", "9.9")
    assert rig.read(rig.store(), 0) == []


def test_nothing_is_stored_in_the_clear_nor_for_other_users(rig: FolderRig) -> None:
    rig.pool[0] = 65
    rig.write(rig.store(), 0)
    assert b"AAAA" not in rig.file_of(0).read_bytes()
    folder = rig.file_of(0).parent.parent
    assert folder.stat().st_mode & 0o077 == 0


def test_over_its_limit_the_folder_loses_what_was_used_longest_ago(rig: FolderRig) -> None:
    foreign = rig.folder / "kv-mine" / "ab" / "precious"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(bytes(1 << 20))
    os.utime(foreign, (1, 1))
    store = rig.store(storage=KVFolder(rig.folder, 20 * BLOCK_BYTES))
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
    rig: FolderRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    rig: FolderRig, monkeypatch: pytest.MonkeyPatch
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


def test_a_folder_that_may_only_be_read_is_read(rig: FolderRig, monkeypatch: pytest.MonkeyPatch) -> None:
    store = rig.store()
    rig.write(store, 0)

    def fails(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", fails)
    assert rig.read(store, 0) == rig.written[:1]


HANGS = """
import sys, threading
from pathlib import Path
from support.kv_store_rig import HASHES, KEY, FolderRig

rig, begun = FolderRig(Path(sys.argv[1])), threading.Event()
Path.read_bytes = lambda path: begun.set() or threading.Event().wait()
rig.store().read(KEY, HASHES[:1])
begun.wait()
rig.close()
"""


@pytest.mark.timeout(150)
def test_a_disk_that_hangs_keeps_no_process_from_its_end(tmp_path: Path) -> None:
    tests = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", HANGS, str(tmp_path)], cwd=tests, check=True, timeout=100)


def test_a_folder_that_goes_away_is_a_miss(rig: FolderRig) -> None:
    store = rig.store()
    rig.write(store, 0)
    shutil.rmtree(rig.folder)
    assert rig.read(store, 0) == []
    rig.write(store, 0)
    assert rig.read(store, 0) == []


def test_no_more_is_queued_than_a_disk_takes(rig: FolderRig) -> None:
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


def test_a_folder_that_cannot_be_made_is_an_error(rig: FolderRig) -> None:
    rig.folder.parent.mkdir(parents=True)
    rig.folder.write_text("a file")
    with pytest.raises(KVStoreError, match=r"^--kv-store .*store: .*; give a folder to write to$"):
        rig.store()


def test_a_block_that_is_evicted_again_is_touched_in_a_folder(rig: FolderRig) -> None:
    store = rig.store()
    rig.write(store, 0)
    assert rig.read(store, 0) == rig.written[:1]
    assert not store.knows(HASHES[0]), "or the folder would take it for unused"
