"""The KV store in an object store that fails, dies or hangs: it costs blocks and nothing else."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from support.kv_store_rig import HASHES, KEY, NUM_BLOCKS, Reader, Rig
from support.played_bucket import PlayedBucket

from splitserve.transport.handoff.protocol import Key
from splitserve.worker import kv_bucket
from splitserve.worker.kv_bucket import KVBucket

URL = "s3://blocks/team/kv"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked for again. (A short limit of each request would fail some on a busy machine.)"""
    monkeypatch.setattr(kv_bucket, "MAX_RETRIES", 0)


def test_a_server_that_dies_while_it_sends_costs_a_miss(
    bucket: PlayedBucket, impatient: None, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    store = rig.store()
    rig.write(store, 0)
    bucket.cut = True
    assert rig.read(store, 0) == []
    assert f"cannot read {URL}/" in caplog.text
    bucket.cut = False
    assert rig.read(store, 0) == rig.written[:1], "it is still there"


def test_a_server_that_fails_costs_blocks_and_nothing_else(
    bucket: PlayedBucket, impatient: None, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    store = rig.store()
    rig.write(store, 0)
    for failure in ((500, b"Internal"), (403, b"ExpiredToken"), (404, b"NoSuchBucket"), (200, b"")):
        bucket.failure = failure
        assert rig.read(store, 0) == []
        rig.write(store, 1)
    assert "(said at most once a minute" in caplog.text
    assert len([record for record in caplog.records if "the KV store" in record.message]) == 1
    assert store.takes_writes


def test_a_server_that_hangs_stalls_neither_the_loop_nor_other_prompts(
    bucket: PlayedBucket, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever waits for a request that hangs does so for ever."""
    for name in ("TIMEOUT", "CONNECT_TIMEOUT"):
        monkeypatch.setattr(kv_bucket, name, timedelta(days=1))
    store, reader = rig.store(), Reader(rig)
    rig.write(store, 0, 1)
    bucket.gate.clear()
    store.read(KEY, HASHES[:1])
    while store.takes_writes:
        store.write(HASHES[2:3], [2])
    store.report(reader)
    assert reader.found == []
    while len(bucket.held) < 1 + KVBucket.num_writers:
        time.sleep(0.01)
    bucket.gate = threading.Event()  # it answers new requests
    bucket.gate.set()
    assert rig.read(store, 1, key=(7, 2)) == rig.written[1:2]
    assert not store.takes_writes
    store.close()


def test_what_a_prompt_needs_no_more_is_not_read(bucket: PlayedBucket, rig: Rig) -> None:
    class Over(Reader):
        def arrived(self, key: Key, count: int) -> list[int]:
            return []

    store = rig.store()
    rig.write(store, *range(NUM_BLOCKS))
    store.read(KEY, HASHES[:1])
    store._reads[KEY][0].result(20)
    bucket.gate.clear()
    bucket.asked.clear()
    for block in range(NUM_BLOCKS):
        store.read(KEY, HASHES[block : block + 1])
    while len(bucket.held) < KVBucket.num_readers:
        time.sleep(0.01)
    store.report(Over(rig))
    bucket.gate.set()
    assert rig.read(store, 0, key=(7, 2)) == rig.written[:1]
    assert len(bucket.asked) == KVBucket.num_readers + 1


ENDS = """
import sys, threading
from support.kv_store_rig import HASHES, KEY, in_bucket

rig = in_bucket(sys.argv[1])
store = rig.store()
rig.write(store, 0)
print("written", flush=True)
sys.stdin.readline()
for _ in range(100):
    store.read(KEY, HASHES[:1])
while store.takes_writes:
    store.write(HASHES[1:2], [1])
sys.stdin.readline()
rig.close()
left = [thread for thread in threading.enumerate() if thread.name == "kv-store"]
assert not left, "one that is still within the library aborts the process"
"""


def test_a_server_that_hangs_keeps_no_process_from_its_end(bucket: PlayedBucket) -> None:
    tests = Path(__file__).resolve().parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS, URL], cwd=tests, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    bucket.gate.clear()
    process.stdin.write("go\n")
    process.stdin.flush()
    while len(bucket.held) < KVBucket.num_readers + KVBucket.num_writers:
        time.sleep(0.01)
    process.communicate("go\n", timeout=20)
    assert process.returncode == 0
