"""The faults of a scenario, sets of them that go together, and its cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from splitserve.coordinator.lifecycle.routing import Policy


@dataclass(frozen=True)
class Faults:
    """Probabilities per message, put or step; mean seconds between events (0: never)."""

    # per message
    drop: float = 0.0
    double: float = 0.0
    # delayed by up to ``LATE_S``, and so overtaken; with it, a message may also overtake the one just before
    # it
    late: float = 0.0
    mangle: float = 0.0  # arrives corrupt: the channel refuses it
    # per put, or per parcel of one
    corrupt_put: float = 0.0  # something else is written
    partial_put: float = 0.0  # half of a block is written
    double_put: float = 0.0
    late_put: float = 0.0
    lost_put: float = 0.0
    # per mover that is opened, but the fallback
    broken_mover: float = 0.0  # all it copies arrives as something else
    mover_error: float = 0.0
    freeze_in_put: float = 0.0  # a one-sided writer is stopped in the middle of its copy
    die_in_put: float = 0.0
    failed_rendezvous: float = 0.0  # two ends never find each other, or one of them never knows
    broken_communicator: float = 0.0  # in the middle of a parcel
    # per step
    step_error: float = 0.0
    step_no_memory: float = 0.0
    # mean seconds between
    kill_every: float = 0.0
    freeze_every: float = 0.0
    hang_every: float = 0.0  # a step does not end, while the worker's loop goes on
    slow_every: float = 0.0
    partition_every: float = 0.0
    drain_every: float = 0.0  # a worker is asked to leave in good order
    spill_every: float = 0.0  # a worker's prefix cache is emptied
    coordinator_restart_every: float = 0.0
    coordinator_freeze_every: float = 0.0
    flip_every: float = 0.0  # a worker is asked to change its role
    adapters_change_every: float = 0.0  # one is added, replaced or taken away
    lend_every: float = 0.0  # a coordinator lets decode workers borrow prompts no more, or again
    # clocks and clients
    clock_drift: float = 0.0  # share by which a process's clock may run too fast or too slow
    clock_jump_every: float = 0.0  # mean seconds until some host's clock is set
    cancel: float = 0.0  # share of requests whose client leaves at some time
    short_deadline: float = 0.0  # share of requests with less than two seconds
    poison: float = (
        0.0  # share of requests that kill each worker that runs them, at once or after a few steps
    )
    # around a coordinator's dispatcher
    late_turn: float = 0.0  # share of its timers and reads that come up to ``LATE_TURN_S`` late
    defect: float = 0.0  # share of the calls that its dispatcher makes to raise
    sink_error: float = 0.0  # share of the calls of a sink that raise
    leave_in_push: float = 0.0  # share of pushed tokens at which a client leaves in the middle of the push


@dataclass(frozen=True)
class Cluster:
    num_prefill: int = 2
    num_decode: int = 2
    num_coordinators: int = 1  # which do not know of each other's requests
    num_hosts: int = 1  # workers of one host hand blocks over by a one-sided mover, if they have it
    one_sided: float = 0.5  # share of prefill workers that have it
    rendezvous: float = 0.0  # share of workers that have a mover that needs a rendezvous
    agents: float = 0.0  # share of workers that have a one-sided mover whose puts linger, also between hosts
    copies: float = (
        0.0  # share of workers that have a one-sided mover whose copies go on by themselves, on one host
    )
    walled: float = 0.0  # share of pairs of workers for which it has never worked and never will
    prefill_blocks: int = 160
    decode_blocks: int = 160
    max_num_seqs: int = 8
    max_batch_tokens: int = 48
    policy: Policy = "hybrid"
    adapters: int = 0  # slots of each process; as many are there at first
    num_flexible: int = (
        0  # processes that can be of either role, besides; half of them begin as decode workers
    )
    num_mixed: int = 0  # processes that are of both roles, besides
    num_borrowing: int = 0  # processes that borrow, besides; half of them prefer prefill
    prefill_ahead: float = 0.5  # share of prefill workers that make the next step while one runs
    window: int = 0  # tokens that a token of the model attends to, 2 or more; 0: all
    drafts: int = 0  # tokens that are drafted of a sequence; then the model mostly repeats prompts
    mtp: bool = False  # the model drafts, too
    next: float = 0.0  # share of processes, at each start, that are of the next build
    images: bool = False  # the model takes images in prompts
    state_blocks: int = 0  # of the model's state of a sequence; 0: it has none
    store: bool = False  # evicted blocks go to a folder of all workers
    num_far: int = 0  # workers, besides, of a build that is no neighbour; one half are decode workers


@dataclass(frozen=True)
class Scenario:
    faults: Faults = field(default_factory=Faults)
    cluster: Cluster = field(default_factory=Cluster)
    rate: float = 100.0  # requests a second
    # coordinators are as patient as the product's, and may give a request up; else they hardly ever do
    product_limits: bool = False
    # share of clients that have an idempotency key, and come again when their coordinator has died
    keyed: float = 0.0
    # share of requests with a grammar, a length at an edge, a tenant and a class of its own, or a client that
    # comes again with its key while the first answer runs
    odd: float = 0.0


NETWORK = Faults(drop=0.01, double=0.02, late=0.02, mangle=0.002, partition_every=0.8, cancel=0.1)
PROCESSES = Faults(
    kill_every=0.5,
    freeze_every=0.5,
    hang_every=1.5,
    slow_every=1.0,
    step_error=0.002,
    step_no_memory=0.002,
    clock_drift=0.02,
    cancel=0.1,
)
MOVERS = Faults(
    corrupt_put=0.02,
    partial_put=0.01,
    double_put=0.02,
    late_put=0.02,
    lost_put=0.01,
    mover_error=0.01,
    freeze_in_put=0.02,
    die_in_put=0.01,
    late=0.01,
    cancel=0.1,
)
EVERYTHING = replace(
    MOVERS,
    drop=0.005,
    double=0.01,
    mangle=0.001,
    partition_every=1.2,
    kill_every=0.8,
    freeze_every=0.8,
    hang_every=2.0,
    slow_every=1.5,
    step_error=0.004,
    step_no_memory=0.004,
    drain_every=1.5,
    spill_every=1.0,
    clock_drift=0.01,
    clock_jump_every=0.5,
    coordinator_restart_every=5.0,
    coordinator_freeze_every=4.0,
    flip_every=0.8,
    lend_every=0.8,
    adapters_change_every=0.3,
    short_deadline=0.03,
    failed_rendezvous=0.1,
    broken_communicator=0.01,
    broken_mover=0.1,
    poison=0.002,
    late_turn=0.01,
    defect=0.001,
    sink_error=0.002,
    leave_in_push=0.005,
)
FLIPS = Faults(
    flip_every=0.15, freeze_in_put=0.03, partition_every=0.3, drop=0.02, double=0.05, late=0.02, cancel=0.1
)
MIXED = replace(
    PROCESSES,
    drop=0.005,
    late=0.01,
    drain_every=1.0,
    partition_every=1.5,
    spill_every=1.0,
    lost_put=0.01,
    corrupt_put=0.01,
)
RENDEZVOUS = Faults(
    failed_rendezvous=0.2,
    broken_communicator=0.03,
    corrupt_put=0.005,
    partial_put=0.005,
    late_put=0.05,
    mover_error=0.01,
    kill_every=0.8,
    freeze_every=0.8,
    cancel=0.2,
)
FEW_BLOCKS = Cluster(prefill_blocks=40, decode_blocks=28)
AGENTS = Faults(
    late_put=0.05,
    lost_put=0.02,
    mover_error=0.01,
    corrupt_put=0.01,
    kill_every=0.5,
    freeze_every=0.8,
    partition_every=1.2,
    drop=0.01,
    late=0.02,
    cancel=0.2,
    spill_every=1.0,
)
