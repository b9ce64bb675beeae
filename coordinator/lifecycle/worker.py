"""One live worker as the coordinator knows it: what it is, what it has to do, and for how much more it has room. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...transport.handoff.sliding_window import num_behind
from ...transport.messages.messages import Drain, Flip, Hello, Load, Peer, Role
from .busy_window import BusyWindow
from .open_workers import OpenWorkers

WorkerId = tuple[str, int]
"""(worker id, incarnation)"""

NO_ROOM, ANY_LENGTH = -1, 1 << 62
QUEUED_BATCHES = 2


@dataclass(slots=True, eq=False)
class Worker:
    """``dispatches`` are those assigned to it; ``pending_*`` count what its own load report cannot know yet.

    ``room`` and ``rank`` say what these come to; whatever changes one of them goes through a method here, which works them out again.
    """

    hello: Hello
    heard: float
    kind: int = 0  # equal for workers that fit together
    number: int = 0  # they come in this order
    queued_batches: int = QUEUED_BATCHES  # a prefill worker is given work for so many of its steps ahead
    load: Load | None = None
    progressed: float = 0.0  # when ``steps`` last grew, or the worker was last idle
    busy: BusyWindow = field(default_factory=BusyWindow)
    cached: set[bytes] = field(default_factory=set)
    num_cache_reports: int = 0  # the last one that is booked in ``cached``
    asked_for_cache: float = -1e9
    dispatches: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)  # what it says it holds
    held_at: float = float("-inf")  # when it last said so
    pending: dict[int, int] = field(default_factory=dict)  # prefill: by dispatch, prompt tokens not yet computed
    pending_blocks: int = 0  # decode: blocks of prompts dispatched and not yet joined
    unreached_since: float | None = None  # its connection is gone since then
    ended: bool = False  # its process has: whoever found that out says so as soon as its last words have been heard
    draining: bool = False  # it gets no new work, and leaves
    drain: Drain | Flip | None = None  # what it is told until it says that it drains
    listed: OpenWorkers[Worker] | None = None  # among those of its role that take new work
    id: WorkerId = field(init=False)
    name: bytes = field(init=False)
    peer: Peer = field(init=False)
    """A decode worker as prefill workers reach it."""
    role: Role = field(init=False)
    block_size: int = field(init=False)
    window: int = field(init=False)
    max_num_seqs: int = field(init=False)
    max_batch_tokens: int = field(init=False)
    num_blocks: int = field(init=False)
    max_model_len: int = field(init=False)
    """The longest sequence, prompt and output, that it can ever hold, in tokens."""
    misfit: str = field(init=False, default="")
    """Why it gets no work, where it fits no worker of the other role: a sentence for its own log."""
    accepting: bool = field(init=False, default=True)  # as it last reported
    num_others: int = field(init=False, default=0)
    """Dispatches of other coordinators that it held when it last reported."""
    pending_tokens: int = field(init=False, default=0)
    """Prompt tokens dispatched to this prefill worker, by whatever coordinator, and not yet computed."""
    blocks_reported: int = field(init=False)
    """That it could give out when it last reported; those that are promised since are ``pending_blocks``."""
    room: int = field(init=False, default=NO_ROOM)
    """The longest new sequence, in tokens, that it can take now."""
    rank: float = field(init=False, default=0.0)
    """Less is better: a prefill worker's pending tokens; of a decode worker the share left of its rows or of its blocks, negative."""

    def __post_init__(self) -> None:
        hello = self.hello
        self.id, self.name = (hello.worker_id, hello.incarnation), hello.worker_id.encode()
        self.peer = Peer(worker_id=hello.worker_id, incarnation=hello.incarnation, address=hello.peer_address)
        self.role, self.block_size, self.window = hello.role, hello.model.block_size, hello.model.window
        self.max_num_seqs, self.max_batch_tokens = max(1, hello.max_num_seqs), hello.max_batch_tokens
        self.num_blocks, self.blocks_reported = max(1, hello.num_blocks), hello.num_blocks
        self.max_model_len = hello.max_model_len
        self._weigh()

    # --- what changes its room ---------------------------------------------------------------------

    def report(self, load: Load) -> None:
        """Its newest load report."""
        before = self.accepting, self.num_others, self.pending_tokens, self.blocks_reported
        self.pending_tokens += load.num_others_tokens - (self.load.num_others_tokens if self.load else 0)
        self.load, self.accepting, self.num_others = load, load.accepting, load.num_others
        self.busy.report(load.counters)
        self.blocks_reported = load.blocks_free + load.blocks_cached
        if before != (self.accepting, self.num_others, self.pending_tokens, self.blocks_reported):
            self._weigh()

    def promise_prompt(self, dispatch: int, num_tokens: int) -> None:
        """This prefill worker is to compute a prompt."""
        self.dispatches.add(dispatch)
        self.pending[dispatch] = num_tokens
        self.pending_tokens += num_tokens
        self._weigh()

    def unpromise_prompt(self, dispatch: int) -> None:
        """It has, or does not need to any more."""
        if dispatch in self.pending:
            self.pending_tokens -= self.pending.pop(dispatch)
            self._weigh()

    def promise_sequence(self, dispatch: int, num_blocks: int) -> None:
        """This decode worker is to run a sequence, for which its last report counts none of so many blocks."""
        self.dispatches.add(dispatch)
        self.pending_blocks += num_blocks
        self._weigh()

    def unpromise_blocks(self, num_blocks: int) -> None:
        """Its own report counts them from now on, or it does not need to give them."""
        if num_blocks:
            self.pending_blocks -= num_blocks
            self._weigh()

    def let_go(self, dispatch: int) -> None:
        """It is assigned to it no more."""
        self.dispatches.discard(dispatch)
        if self.role == "decode" or not self.accepting:
            self._weigh()

    def _weigh(self) -> None:
        before = self.rank
        if self.role == "prefill":
            self.room, self.rank = self._prompt_room(), self.pending_tokens
        else:
            self.room, self.rank = self._sequence_room(), -self.share_left(0)
        self.room = min(self.room, self.max_model_len - 1)
        if self.listed is not None:
            self.listed.changed(self, before)

    # --- what that comes to ------------------------------------------------------------------------

    @property
    def most_ahead(self) -> int:
        """Prompt tokens that this prefill worker is given at most, if it is not one prompt alone."""
        return self.queued_batches * self.max_batch_tokens

    def _prompt_room(self) -> int:
        """A prompt is computed after those that are no longer than it. There is room for it where there are none of these, or where it is
        with them no more than ``most_ahead`` tokens: for none that is longer than one without room."""
        if not self.accepting and self.dispatches:
            return NO_ROOM
        longest, ahead, most = ANY_LENGTH, 0, self.most_ahead
        for num_tokens in sorted(self.pending.values()):
            if longest < num_tokens:
                break
            ahead += num_tokens
            if num_tokens + ahead > most:
                return min(longest, num_tokens - 1)
            longest = most - ahead
        return longest

    def _sequence_room(self) -> int:
        num_rows = len(self.dispatches) + self.num_others
        if not num_rows:
            return ANY_LENGTH  # what does not even fit into an idle worker is refused by it, with the reason
        if num_rows >= self.max_num_seqs:
            return NO_ROOM
        num_blocks = self.blocks_reported - self.pending_blocks - 1
        if self.window and num_blocks >= self.window // self.block_size + 2:
            return ANY_LENGTH
        return max(NO_ROOM, num_blocks * self.block_size)

    def share_left(self, num_needed_blocks: int) -> float:
        """Of this decode worker's rows or of its blocks, whichever is less, once one more sequence with so many blocks is there."""
        rows = 1 - (len(self.dispatches) + self.num_others + 1) / self.max_num_seqs
        blocks = (self.blocks_reported - self.pending_blocks - num_needed_blocks) / self.num_blocks
        return rows if rows < blocks else blocks

    def rank_of_equals(self, num_tokens: int) -> float:
        """Who ranks behind this is no match for this worker, for a sequence of that length, unless by its cache."""
        if self.role == "prefill":
            return self.pending_tokens + self.block_size - 1
        return -self.share_left(self.blocks_for(num_tokens))

    def blocks_for(self, num_tokens: int) -> int:
        """What a sequence of that length takes on a decode worker: those in reach of its next token."""
        return -(-num_tokens // self.block_size) - num_behind(num_tokens, self.window, self.block_size)

    def match_prefix(self, hashes: list[bytes]) -> int:
        """How many leading blocks of a prompt this worker really has."""
        for i, block_hash in enumerate(hashes):
            if block_hash not in self.cached:
                return i
        return len(hashes)
