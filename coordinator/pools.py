"""The workers as the coordinator knows them: who lives, how full they are, what their caches really hold. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..transport.messages import BlockEvents, Drain, Flip, Hello, Load, ModelIdentity, Peer, Role, from_hashes

WorkerId = tuple[str, int]
"""(worker id, incarnation)"""


@dataclass(slots=True, eq=False)
class Worker:
    """One live worker. ``dispatches`` are those assigned to it; ``pending_*`` count what its own load report cannot know yet."""

    hello: Hello
    heard: float
    kind: int = 0  # equal for workers that fit together
    load: Load | None = None
    progressed: float = 0.0  # when ``steps`` last grew, or the worker was last idle
    cached: set[bytes] = field(default_factory=set)
    num_cache_reports: int = 0  # the last one that is booked in ``cached``
    asked_for_cache: float = -1e9
    dispatches: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)  # what it says it holds
    held_at: float = float("-inf")  # when it last said so
    pending: dict[int, int] = field(default_factory=dict)  # prefill: by dispatch, prompt tokens not yet computed
    pending_blocks: int = 0  # decode: blocks of prompts dispatched and not yet joined
    unreached_since: float | None = None  # its connection is gone since then
    draining: bool = False  # it gets no new work, and leaves
    drain: Drain | Flip | None = None  # what it is told until it says that it drains
    id: WorkerId = field(init=False)
    peer: Peer = field(init=False)
    """A decode worker as prefill workers reach it."""
    role: Role = field(init=False)
    block_size: int = field(init=False)
    max_num_seqs: int = field(init=False)
    max_batch_tokens: int = field(init=False)
    num_blocks: int = field(init=False)
    accepting: bool = field(init=False, default=True)  # as it last reported
    num_others: int = field(init=False, default=0)
    """Dispatches of other coordinators that it held when it last reported."""
    pending_tokens: int = field(init=False, default=0)
    """Prompt tokens dispatched to this prefill worker, by whatever coordinator, and not yet computed."""
    blocks_reported: int = field(init=False)
    """That it could give out when it last reported; those that are promised since are ``pending_blocks``."""

    def __post_init__(self) -> None:
        hello = self.hello
        self.id = (hello.worker_id, hello.incarnation)
        self.peer = Peer(worker_id=hello.worker_id, incarnation=hello.incarnation, address=hello.peer_address)
        self.role, self.block_size = hello.role, hello.model.block_size
        self.max_num_seqs, self.max_batch_tokens = max(1, hello.max_num_seqs), hello.max_batch_tokens
        self.num_blocks, self.blocks_reported = max(1, hello.num_blocks), hello.num_blocks

    def report(self, load: Load) -> None:
        """Its newest load report."""
        self.pending_tokens += load.num_others_tokens - (self.load.num_others_tokens if self.load else 0)
        self.load, self.accepting, self.num_others = load, load.accepting, load.num_others
        self.blocks_reported = load.blocks_free + load.blocks_cached

    def promise(self, dispatch: int, num_tokens: int) -> None:
        """This prefill worker is to compute a prompt."""
        self.pending[dispatch] = num_tokens
        self.pending_tokens += num_tokens

    def unpromise(self, dispatch: int) -> None:
        """It has, or does not need to any more."""
        self.pending_tokens -= self.pending.pop(dispatch, 0)

    def is_ahead_of(self, num_tokens: int, most: int) -> bool:
        """Whether what this prefill worker would compute before a prompt of this length (it takes short prompts first), and the prompt
        itself, is more than ``most`` tokens."""
        ahead = 0
        for pending in self.pending.values():
            if pending <= num_tokens:
                ahead += pending
                if ahead + num_tokens > most:
                    return True
        return False

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_room_for(self, num_tokens: int) -> bool:
        """Whether this decode worker can take a sequence of this length now."""
        num_rows = len(self.dispatches) + self.num_others
        if not num_rows:
            return True  # what does not even fit into an idle worker is refused by it, with the reason
        return num_rows < self.max_num_seqs and self.blocks_reported - self.pending_blocks > -(-num_tokens // self.block_size)

    def match_prefix(self, hashes: list[bytes]) -> int:
        """How many leading blocks of a prompt this worker really has."""
        for i, block_hash in enumerate(hashes):
            if block_hash not in self.cached:
                return i
        return len(hashes)


class Pools:
    """The registry of live workers, by role."""

    def __init__(self, dead_after_s: float, progress_timeout_s: float, unreachable_s: float) -> None:
        self._dead_after_s, self._progress_timeout_s, self._unreachable_s = dead_after_s, progress_timeout_s, unreachable_s
        self.workers: dict[WorkerId, Worker] = {}
        self._kinds: dict[ModelIdentity, int] = {}
        self.num_changes = 0  # who is here has changed so often
        self.max_sequence_tokens = 0
        """The longest sequence that every live worker can hold, or could when there last was one."""
        self._came_or_went()

    def of_role(self, role: Role) -> list[Worker]:
        return self._of_role[role]

    def open_of_role(self, role: Role) -> list[Worker]:
        """Those that take new work."""
        return [worker for worker in self._of_role[role] if not worker.draining]

    def _came_or_went(self) -> None:
        """Works out what depends only on who is here."""
        self.num_changes += 1
        workers = self.workers.values()
        self._of_role: dict[Role, list[Worker]] = {
            "prefill": [w for w in workers if w.role == "prefill"],
            "decode": [w for w in workers if w.role == "decode"],
        }
        self.gap = _gap(self._of_role["prefill"], self._of_role["decode"])
        """Why no request can be served now, as a sentence; empty where at least one prefill and one decode worker fit together."""
        self.has_mixed = any(w.hello.mixed for w in workers)
        """Whether any worker's process is of both roles."""
        if workers:
            self.max_sequence_tokens = min(w.hello.max_model_len for w in workers)

    def add(self, hello: Hello, now: float) -> list[Worker]:
        """A worker says hello. Returns its earlier incarnations, which are dead."""
        replaced = [w for w in self.workers.values() if w.hello.worker_id == hello.worker_id and w.id[1] != hello.incarnation]
        for worker in replaced:
            del self.workers[worker.id]
        known = self.workers.get((hello.worker_id, hello.incarnation))
        if known is not None:
            known.heard = now
        else:
            kind = self._kinds.setdefault(hello.model, len(self._kinds))
            self.workers[(hello.worker_id, hello.incarnation)] = Worker(hello, now, kind, progressed=now)
        self._came_or_went()
        return replaced

    def remove(self, worker: Worker) -> None:
        self.workers.pop(worker.id, None)
        self._came_or_went()

    def hear(self, load: Load, now: float) -> Worker | None:
        """A heartbeat. None: no such worker lives."""
        worker = self.workers.get((load.worker_id, load.incarnation))
        if worker is None:
            return None
        if not load.busy or worker.load is None or load.steps > worker.load.steps:
            worker.progressed = now
        worker.heard, worker.unreached_since = now, None
        worker.report(load)
        if load.draining:
            worker.draining, worker.drain = True, None
        return worker

    def book(self, events: BlockEvents) -> None:
        """What a worker's prefix cache gained and lost. A report that is old, or has one missing before it, is not booked."""
        worker = self.workers.get((events.worker_id, events.incarnation))
        if worker is None or events.number <= worker.num_cache_reports:
            return
        if events.reset:
            worker.cached.clear()
        elif events.number != worker.num_cache_reports + 1:
            return
        worker.num_cache_reports = events.number
        worker.cached.update(from_hashes(events.stored))
        worker.cached.difference_update(from_hashes(events.removed))

    def misfits(self) -> list[str]:
        """A sentence for each worker that fits none of the other role's workers, though there are some."""
        found = []
        roles: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))
        for role, other in roles:
            others = self._of_role[other]
            for worker in self._of_role[role]:
                if others and all(worker.hello.model != o.hello.model for o in others):
                    found.append(
                        f"{role} worker {worker.hello.worker_id} gets no work: it does not fit {other} worker "
                        f"{others[0].hello.worker_id}: {_difference(worker, others[0])}"
                    )
        return found

    def overdue(self, heartbeat_s: float, now: float) -> list[Worker]:
        """Those whose heartbeat should have come, or that could not be reached the last time."""
        workers = self.workers.values()
        return [worker for worker in workers if now - worker.heard > 1.2 * heartbeat_s or worker.unreached_since is not None]

    def forgive(self, seconds: float) -> None:
        """So long the coordinator itself stood still: it counts as nobody's silence."""
        for worker in self.workers.values():
            worker.heard += seconds
            if worker.unreached_since is not None:
                worker.unreached_since += seconds
            worker.progressed += seconds

    def dead(self, now: float) -> list[tuple[Worker, str]]:
        """Workers that are silent, or busy without progress, for too long, each with the reason."""
        found = []
        for worker in self.workers.values():
            if worker.unreached_since is not None and now - worker.unreached_since > self._unreachable_s:
                found.append((worker, f"its connection is gone, and it has been silent for {now - worker.heard:.1f} s"))
            elif now - worker.heard > self._dead_after_s:
                found.append((worker, f"silent for {now - worker.heard:.1f} s"))
            elif (stood_s := worker.heard - worker.progressed) > self._progress_timeout_s:  # by its own words: who is silent says nothing
                found.append((worker, f"busy without finishing a step for {stood_s:.1f} s"))
        return found


def _gap(prefills: list[Worker], decodes: list[Worker]) -> str:
    if not prefills and not decodes:
        return "no worker is connected"
    if not prefills or not decodes:
        return f"no {'decode' if prefills else 'prefill'} worker is connected"
    models = {w.hello.model for w in prefills}
    if any(w.hello.model in models for w in decodes):
        return ""
    a, b = prefills[0], decodes[0]
    return f"prefill worker {a.hello.worker_id} and decode worker {b.hello.worker_id} do not fit together: {_difference(a, b)}"


def _difference(a: Worker, b: Worker) -> str:
    ours, theirs = a.hello.model.model_dump(), b.hello.model.model_dump()
    name = next(name for name in ours if ours[name] != theirs[name])
    return f"their {name.replace('_', ' ')} differs ({ours[name]!r} and {theirs[name]!r})"
