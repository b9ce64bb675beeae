"""An object store is asked for no block that this worker knows to be there."""

from __future__ import annotations

from collections import Counter

from support.kv_store_rig import HASHES, Rig
from support.played_bucket import PlayedBucket

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.cache.offload import Offload
from splitserve.worker.kv_bucket import KVBucket
from splitserve.worker.kv_store import KnownHashes, KVStore


def methods(bucket: PlayedBucket) -> Counter[str]:
    """Count the requests since the last call by their methods."""
    found = Counter(asked.partition(" ")[0] for asked in bucket.asked)
    bucket.asked.clear()
    return found


class Cache:
    """A worker's, whose every block is evicted, and offered to the store before."""

    def __init__(self, rig: Rig, store: KVStore) -> None:
        self._rig, self._store = rig, store
        self._blocks = BlockManager(4)
        self._offload = Offload(self._blocks, store.knows)

    def evict(self, *numbers: int) -> None:
        for number in numbers:
            (block,) = self._blocks.allocate(1) or []
            self._blocks.commit_all([block], [HASHES[number]], None)
            self._blocks.release([block])
            hashes, _ = self._offload.take(self._store.group, idle=True)
            if hashes:
                assert hashes == [HASHES[number]]
                self._rig.write(self._store, number)
            self._blocks.release(self._blocks.allocate(4) or [])
            assert self._offload.take(1, idle=True) == ([], []), "it is evicted"


def test_what_was_written_or_read_is_not_asked_for(bucket: PlayedBucket, rig: Rig) -> None:
    store = rig.store()
    cache = Cache(rig, store)
    bucket.asked.clear()
    cache.evict(0, 1)
    assert methods(bucket) == {"HEAD": 2, "PUT": 2}
    cache.evict(0, 1)
    assert methods(bucket) == {}
    other = rig.store()
    bucket.asked.clear()
    assert rig.read(other, 0) == rig.written[:1]
    assert methods(bucket) == {"GET": 1}
    Cache(rig, other).evict(0, 1, 1)
    assert methods(bucket) == {"HEAD": 1}, "one, for the block that it has not written or read"


def test_what_a_lifecycle_rule_has_removed_is_written_again_once_a_read_has_missed_it(
    bucket: PlayedBucket, rig: Rig
) -> None:
    store = rig.store()
    cache = Cache(rig, store)
    cache.evict(0, 1)
    bucket.objects.clear()
    cache.evict(0, 1)
    assert bucket.objects == {}, "it believes that they are there"
    assert rig.read(store, 0) == []
    cache.evict(0, 1)
    assert [name[-32:] for name in bucket.objects] == [HASHES[0].hex()]
    assert rig.read(store, 0) == rig.written[:1]


def test_what_is_found_damaged_is_written_again(bucket: PlayedBucket, rig: Rig) -> None:
    store = rig.store()
    cache = Cache(rig, store)
    cache.evict(0)
    (name,) = bucket.objects
    bucket.objects[name] = b"x" * len(bucket.objects[name])
    assert rig.read(store, 0) == []
    cache.evict(0)
    assert rig.read(store, 0) == rig.written[:1]


def test_what_could_not_be_written_is_not_known(bucket: PlayedBucket, rig: Rig) -> None:
    store = rig.store()
    bucket.failure = 403, b"ExpiredToken"
    rig.write(store, 0)
    assert not store.knows(HASHES[0])


def test_the_names_that_are_known_are_limited() -> None:
    known = KnownHashes(3)
    for number in (0, 1, 2, 0, 3):
        known.note(HASHES[number], is_there=True)
    assert [number for number in range(5) if HASHES[number] in known] == [0, 2, 3], "the latest"
    known.note(HASHES[0], is_there=False)
    known.note(HASHES[4], is_there=False)
    assert [number for number in range(5) if HASHES[number] in known] == [2, 3]
    assert KVBucket.max_known > 0
