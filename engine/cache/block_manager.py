"""The owner of every KV block, and the prefix cache: blocks found by their hash. Free of torch.

Every block is in exactly one of three states, so that free + cached + used = total:

    free    no content worth keeping
    cached  unreferenced, but its hash is known: a later request may use it, or it is evicted
    used    referenced by one or more sequences or leases (its hash may be known too)

Eviction takes the least recently used cached block that no other cached block continues (leaves first).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from ...transport.messages.blocks import NO_BLOCK


class CacheEvents:
    """Blocks that a cache has stored and removed since the last call. Each role of a process has its own."""

    def __init__(self, fetch: Callable[[], None], close: Callable[[CacheEvents], None]) -> None:
        """``fetch`` has the newest noted here."""
        self._fetch, self._close = fetch, close
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes (stored, removed) since the last call."""
        self._fetch()
        stored, removed = list(self._stored), list(self._removed)
        self._stored, self._removed = {}, {}
        return stored, removed

    def note(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        for block_hash in stored:
            if self._removed.pop(block_hash, 0) == 0:
                self._stored[block_hash] = None
        for block_hash in removed:
            if self._stored.pop(block_hash, 0) == 0:
                self._removed[block_hash] = None

    def close(self) -> None:
        """Nobody will ask again."""
        self._close(self)


def has_spare(num_available: int, num_blocks: int) -> bool:
    """Whether more than a sixteenth of its blocks can be given out: else a worker accepts no prompts."""
    return num_available > num_blocks // 16


class BlockManager:
    """``num_blocks`` blocks numbered from 0. Capacity misses are None; misuse is an AssertionError."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._parent: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._num_children: defaultdict[bytes, int] = defaultdict(int)  # those that have any
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._watchers: list[CacheEvents] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` could give out now."""
        return len(self._free) + len(self._idle)

    def match_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many leading hashes are here, used or cached."""
        for i, block_hash in enumerate(hashes):
            if block_hash not in self._block_of:
                return i
        return len(hashes)

    def num_idle_among(self, hashes: Sequence[bytes]) -> int:
        """How many of these are here but unreferenced: taking them up lowers ``num_available`` by as many."""
        return sum(self._references[self._block_of[h]] == 0 for h in hashes if h in self._block_of)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of these hashes. All are here."""
        return [self._block_of[block_hash] for block_hash in hashes]

    def acquire_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """References the blocks of the leading hashes that are here, and returns them in order."""
        blocks = self.find(hashes[: self.match_prefix(hashes)])
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1
        return blocks

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with undefined content, each referenced once; None, and nothing done, where there
        are not as many."""
        if count > self.num_available:
            return None
        if len(self._free) < count:
            self._evict(count - len(self._free))
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def commit(self, block: int, block_hash: bytes, parent: bytes | None) -> None:
        """The block is full and valid: its hash may be found from now on. A second block of the same hash
        stays private."""
        assert self._references[block] > 0, "only a block in use can be committed"
        if block_hash in self._block_of:
            return
        assert self._hash[block] is None, "a block holds one hash"
        self._hash[block], self._parent[block] = block_hash, parent
        self._block_of[block_hash] = block
        if parent is not None:
            self._num_children[parent] += 1
        if not self._removed or self._removed.pop(block_hash, 0) == 0:
            self._stored[block_hash] = None

    def commit_all(self, blocks: Sequence[int], hashes: Sequence[bytes], parent: bytes | None) -> None:
        """The same of a sequence's next blocks, in order; the first of them follows the one of the hash
        ``parent``."""
        if (known := self.match_prefix(hashes)) > 0:
            blocks, hashes, parent = blocks[known:], hashes[known:], hashes[known - 1]
        if not self._block_of.keys().isdisjoint(hashes) or not self._removed.keys().isdisjoint(hashes):
            for block, block_hash in zip(blocks, hashes, strict=True):
                self.commit(block, block_hash, parent)
                parent = block_hash
            return
        references, num_children = self._references, self._num_children
        hash_of, parent_of = self._hash, self._parent
        for block, block_hash in zip(blocks, hashes, strict=True):
            assert references[block] > 0, "only a block in use can be committed"
            assert hash_of[block] is None, "a block holds one hash"
            hash_of[block], parent_of[block] = block_hash, parent
            if parent is not None:
                num_children[parent] += 1
            parent = block_hash
        self._block_of.update(zip(hashes, blocks, strict=True))
        self._stored.update(dict.fromkeys(hashes))

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each but NO_BLOCK. Give a sequence's blocks in order: its tail becomes the
        older, evicted first."""
        for block in reversed(blocks):
            if block == NO_BLOCK:
                return
            assert self._references[block] > 0, "a block was released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def cached_hashes(self) -> list[bytes]:
        """Every hash that can be found here."""
        return list(self._block_of)

    def watch(self) -> CacheEvents:
        """What is stored and removed from now on."""
        self._notify_watchers()
        self._watchers.append(CacheEvents(self._notify_watchers, self._watchers.remove))
        return self._watchers[-1]

    def _notify_watchers(self) -> None:
        for events in self._watchers:
            events.note(self._stored, self._removed)
        self._stored, self._removed = {}, {}

    def _evict(self, count: int) -> None:
        idle, hashes, num_children = self._idle, self._hash, self._num_children
        for _ in range(count):
            block = next(iter(idle))
            if hashes[block] in num_children:  # no leaf
                block = next((b for b in idle if hashes[b] not in num_children), block)
            self._forget(block)
            del idle[block]
            self._free.append(block)

    def _forget(self, block: int) -> None:
        block_hash, parent = self._hash[block], self._parent[block]
        assert block_hash is not None, "an idle block has a hash"
        del self._block_of[block_hash]
        self._hash[block] = self._parent[block] = None
        if parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
        if self._stored.pop(block_hash, 0) == 0:
            self._removed[block_hash] = None
