"""One live worker as the coordinator knows it, and how busy it was lately by its own reports. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from ...transport.messages.blocks import num_behind
from ...transport.messages.messages import Adapter, Drain, Flip, Hello, Load, Peer, Role
from ...transport.messages.prompt_order import UNLIMITED, max_prompt_tokens

WorkerId = tuple[str, int]  # worker id, incarnation
NO_ROOM = -1
DELAY_WEIGHT = 1 / 16
"""A borrowed sequence counts as this much of a step's prompt tokens at the prefill worker that keeps it."""
QUEUED_BATCHES = 2
MAX_64 = (1 << 64) - 1
WINDOW_S = 10.0
MIN_SPACING_S = 0.5  # between two reports of a BusyWindow; workers report much more often


class Listing(Protocol):
    """A list of workers that take new work (open_workers.py)."""

    def changed(self, worker: WorkerRecord, rank_before: float) -> None: ...
    def add(self, worker: WorkerRecord) -> None: ...
    def remove(self, worker: WorkerRecord) -> None: ...


class BusyWindow:
    """Measures how busy a worker was in the last WINDOW_S seconds, by the worker's own clock."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, float]] = deque()
        """(uptime, busy) in seconds; the first is WINDOW_S old, or the oldest there is."""
        self._newest: tuple[float, float] | None = None

    def report(self, counters: Mapping[str, float]) -> None:
        """Take the cumulative counters of a load report; one without ``busy_seconds`` is ignored."""
        uptime, busy = counters.get("uptime_seconds"), counters.get("busy_seconds")
        if uptime is None or busy is None:
            return
        self._newest = uptime, busy
        if not self._kept or uptime - self._kept[-1][0] >= MIN_SPACING_S:
            self._kept.append(self._newest)
        while len(self._kept) > 1 and self._kept[1][0] <= uptime - WINDOW_S:
            self._kept.popleft()

    @property
    def share(self) -> float | None:
        """Share of the window in which a step ran, 0 to 1; None: not known."""
        if self._newest is None or (seconds := self._newest[0] - self._kept[0][0]) <= 0:
            return None
        return min(1.0, max(0.0, (self._newest[1] - self._kept[0][1]) / seconds))


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """A worker's identity, its last report, and what was assigned to it since.

    ``pending`` and ``pending_blocks`` count what its load report cannot know yet. ``room`` and ``rank``
    follow from both; only ``report``, ``reserve_*`` and ``release*`` change them.
    """

    hello: Hello
    last_seen: float  # when its last message came
    kind: int = 0  # equal for workers whose KV caches fit together
    number: int = 0  # in the order in which workers came
    queued_batches: int = QUEUED_BATCHES  # a prefill worker's steps for which it is given prompts ahead
    load: Load | None = None
    progressed: float = 0.0  # when ``steps`` last grew, or the worker was last idle
    busy: BusyWindow = field(default_factory=BusyWindow)
    cached: set[bytes] = field(default_factory=set)  # hashes of the blocks in its prefix cache
    answers: set[bytes] = field(default_factory=set)  # that it keeps for clients that may come again
    num_cache_reports: int = 0  # the last one that ``cached`` has
    adapters: tuple[Adapter, ...] = ()  # as it last reported
    contents: frozenset[str] = frozenset()  # of these
    welcomed_at: float = -1e9  # when it was last asked for a report of its whole cache
    dispatches: set[int] = field(default_factory=set)  # assigned to it
    held: set[int] = field(default_factory=set)  # as it last reported
    held_at: float = float("-inf")  # when it last reported
    pending: dict[int, int] = field(default_factory=dict)  # by dispatch: prompt tokens not yet computed
    pending_blocks: int = 0  # decode: blocks reserved for sequences that have not joined
    unreached_since: float | None = None  # its connection is gone since then
    ended: bool = False  # its process has; it is removed as soon as its last messages are read
    draining: bool = False  # it gets no new work, and leaves
    drain: Drain | Flip | None = None  # repeated until it reports that it drains
    listed: Listing | None = None  # the list of its role's workers that take new work
    home: WorkerRecord | None = None  # of a reserve: its process's worker of the role that it prefers
    num_borrowed: int = 0  # sequences that a prefill worker's process generates for
    misfit: str = ""  # why it gets no work, where it fits no worker of the other role: for its own log
    id: WorkerId = field(init=False)
    process: tuple[str, int] = field(init=False)  # its name and number
    name_hash: int = field(init=False)  # 64 bits, the same in each coordinator
    peer: Peer = field(init=False)  # how prefill workers reach it
    role: Role = field(init=False)
    block_size: int = field(init=False)
    window: int = field(init=False)
    fixed_blocks: int = field(init=False)  # of each sequence, however long: two copies of its state
    max_num_seqs: int = field(init=False)
    max_batch_tokens: int = field(init=False)
    num_blocks: int = field(init=False)
    max_model_len: int = field(init=False)  # the longest sequence that it can ever hold, in tokens
    is_mixed: bool = field(init=False)  # its process has the other role too, and prefers neither
    is_reserve: bool = field(init=False)  # its process prefers the other role: it gets borrowed work alone
    accepting: bool = field(init=False, default=True)  # as it last reported
    num_others: int = field(init=False, default=0)  # dispatches of other coordinators, as it last reported
    pending_tokens: int = field(init=False, default=0)  # prompt tokens not yet computed, of all coordinators
    blocks_reported: int = field(init=False)  # free or evictable, as it last reported
    room: int = field(init=False, default=NO_ROOM)  # the longest new sequence that it can take now, in tokens
    rank: float = field(init=False, default=0.0)
    """Less is better. Prefill: pending tokens, and DELAY_WEIGHT of a step's for each borrowed sequence, which
    a prompt delays. Decode: minus the smaller free share of rows or blocks."""

    def __post_init__(self) -> None:
        hello = self.hello
        self.id, self.name_hash = (hello.worker_id, hello.incarnation), hash64(hello.worker_id)
        self.process = hello.process, hello.pid
        self.peer = Peer(worker_id=hello.worker_id, incarnation=hello.incarnation, address=hello.peer_address)
        self.role, self.block_size, self.window = hello.role, hello.model.block_size, hello.model.window
        self.fixed_blocks = 2 * hello.model.state_blocks
        self.max_num_seqs, self.max_batch_tokens = max(1, hello.max_num_seqs), hello.max_batch_tokens
        self.num_blocks, self.blocks_reported = max(1, hello.num_blocks), hello.num_blocks
        self.max_model_len = hello.max_model_len
        if hello.mixed:  # between its roles a prompt's last block moves, and is there twice
            most = self.num_blocks - 1 - 2 * self.fixed_blocks
            self.max_model_len = min(self.max_model_len, most * self.block_size)
        self.is_mixed = hello.mixed and not hello.home
        self.is_reserve = hello.home not in ("", hello.role)
        self._update()

    def list_in(self, listing: Listing | None) -> None:
        """Put it into this list of workers that take new work, and out of another."""
        if self.listed is not None:
            self.listed.remove(self)
        self.listed = None
        self._update()
        if listing is not None:
            listing.add(self)
        self.listed = listing

    # --- what changes its room -----------------------------------------------------------------------

    def report(self, load: Load) -> None:
        """Take its newest load report."""
        before = self.accepting, self.num_others, self.pending_tokens, self.blocks_reported
        self.pending_tokens += load.num_others_tokens - (self.load.num_others_tokens if self.load else 0)
        self.load, self.accepting, self.num_others = load, load.accepting, load.num_others
        self.busy.report(load.counters)
        self.blocks_reported = load.blocks_free + load.blocks_cached
        if before != (self.accepting, self.num_others, self.pending_tokens, self.blocks_reported):
            self._update()

    def reserve_prompt(self, dispatch: int, num_tokens: int) -> None:
        """Assign a prompt to this prefill worker."""
        self.dispatches.add(dispatch)
        self.pending[dispatch] = num_tokens
        self.pending_tokens += num_tokens
        self._update()

    def release_prompt(self, dispatch: int) -> None:
        """Stop counting a prompt: it is computed, or no longer needed."""
        if dispatch in self.pending:
            self.pending_tokens -= self.pending.pop(dispatch)
            self._update()

    def reserve_sequence(self, dispatch: int, num_blocks: int) -> None:
        """Assign a sequence to this decode worker; its last report does not count these blocks."""
        self.dispatches.add(dispatch)
        self.pending_blocks += num_blocks
        self._update()

    def release_blocks(self, num_blocks: int) -> None:
        """Stop counting reserved blocks: its reports count them now, or they are no longer needed."""
        if num_blocks:
            self.pending_blocks -= num_blocks
            self._update()

    def release(self, dispatch: int) -> None:
        """Take a dispatch away."""
        self.dispatches.discard(dispatch)
        if self.role == "decode" or not self.accepting:
            self._update()

    def _update(self) -> None:
        before = self.rank
        if self.role == "prefill":
            delay = self.num_borrowed * self.max_batch_tokens * DELAY_WEIGHT
            self.room, self.rank = self._max_prompt_tokens(), self.pending_tokens + delay
        else:
            self.room, self.rank = self._max_sequence_tokens(), -self.share_left(0)
            if self.home is not None and self.home.num_borrowed != (num := len(self.dispatches)):
                self.home.num_borrowed = num
                self.home._update()
        self.room = min(self.room, self.max_model_len - 1)
        if self.listed is not None:
            self.listed.changed(self, before)

    # --- what follows from that ----------------------------------------------------------------------

    @property
    def queue_budget(self) -> int:
        """Prompt tokens that this prefill worker may have ahead; a single prompt may be longer."""
        return self.queued_batches * self.max_batch_tokens

    def _max_prompt_tokens(self) -> int:
        """The longest prompt that this prefill worker may be given now, in tokens; one borrowed batch."""
        if self.dispatches and not self.accepting:
            return NO_ROOM
        if self.is_reserve and self.pending_tokens:
            return max(NO_ROOM, self.max_batch_tokens - self.pending_tokens)
        return max_prompt_tokens(self.pending.values(), self.queue_budget)

    def _max_sequence_tokens(self) -> int:
        """The longest sequence that this decode worker may be given now, in tokens. Borrowed sequences get
        half of the rows and of the blocks."""
        num_rows = len(self.dispatches) + self.num_others
        if self.is_reserve:
            num_blocks = self.blocks_reported - self.pending_blocks - self.num_blocks // 2 - self.fixed_blocks
            return (
                max(NO_ROOM, num_blocks * self.block_size) if num_rows < self.max_num_seqs // 2 else NO_ROOM
            )
        if not num_rows:
            return UNLIMITED  # an idle worker itself refuses what never fits, with the reason
        if num_rows >= self.max_num_seqs:
            return NO_ROOM
        num_blocks = self.blocks_reported - self.pending_blocks - 1 - self.fixed_blocks
        if self.window and num_blocks >= self.window // self.block_size + 2:
            return UNLIMITED
        return max(NO_ROOM, num_blocks * self.block_size)

    def share_left(self, num_needed_blocks: int) -> float:
        """Return the free share of rows or of blocks, whichever is less, after one more such sequence."""
        rows = 1 - (len(self.dispatches) + self.num_others + 1) / self.max_num_seqs
        blocks = (self.blocks_reported - self.pending_blocks - num_needed_blocks) / self.num_blocks
        return rows if rows < blocks else blocks

    def max_competing_rank(self, num_tokens: int) -> float:
        """Return the rank above which a worker without a cached prefix is worse for this sequence."""
        if self.role == "prefill":
            return self.rank + self.block_size - 1
        return -self.share_left(self.blocks_for(num_tokens))

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that a sequence's next token attends to, and those of its state."""
        num_blocks = -(-num_tokens // self.block_size) + self.fixed_blocks
        return (
            num_blocks - num_behind(num_tokens, self.window, self.block_size) if self.window else num_blocks
        )

    def match_prefix(self, hashes: list[bytes]) -> int:
        """Return how many leading blocks of a prompt this worker has cached: one that has a block has all
        before it, since caches evict leaves first."""
        cached = self.cached
        return bisect_left(hashes, True, key=lambda block_hash: block_hash not in cached)

    def has(self, adapter: str) -> bool:
        """Whether it has the adapter of this content; it has the empty one, the model itself."""
        return not adapter or adapter in self.contents

    def reported_without(self, dispatch: int, since: float) -> bool:
        """Whether it has reported since then without naming this dispatch."""
        return self.held_at >= since and dispatch not in self.held


def hash64(name: str) -> int:
    """Return 64 bits of a name, the same in each coordinator."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())


def shuffled(name_hash: int, number: int) -> int:
    """Return a sort key that differs from number to number: multiplication by an odd number modulo 2^64."""
    return name_hash * (2 * number + 1) & MAX_64
