"""What a world is like: how cruel its adversary is, how large its cluster, what its clients want.

Most seeds draw their own scenario: which faults are there at all, how frequent each is, how little memory
there is. Faults that are always all there hide what happens when only some of them meet.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from simulation.faults import (
    AGENTS,
    EVERYTHING,
    FEW_BLOCKS,
    FLIPS,
    MIXED,
    MOVERS,
    NETWORK,
    PROCESSES,
    RENDEZVOUS,
    Cluster,
    Faults,
    Scenario,
)
from simulation.load import decode_s

MAX_DECODE_S, DRAWN_FOR = 36.0, 500
"""A drawn world's decode workers can serve ``DRAWN_FOR`` requests (``campaign.REQUESTS``) within this time.
Less than ``campaign.REST_S``: workers also stand still, are slow, and compute again."""
NAMED = {
    "calm": Scenario(),
    "network": Scenario(NETWORK),
    "processes": Scenario(PROCESSES),
    "movers": Scenario(MOVERS),
    "writers": Scenario(
        Faults(corrupt_put=0.05, partial_put=0.05, double=0.5, freeze_in_put=0.05, cancel=0.05),
        Cluster(one_sided=1.0),
    ),
    "drains": Scenario(Faults(drain_every=0.3), Cluster(num_prefill=3, num_decode=3)),
    "memory": Scenario(Faults(cancel=0.1, spill_every=0.5, step_no_memory=0.01), FEW_BLOCKS),
    "echoes": Scenario(
        Faults(
            drop=0.1, double=0.3, late=0.1, corrupt_put=0.05, lost_put=0.02, cancel=0.1, short_deadline=0.1
        )
    ),
    "nacks": Scenario(Faults(drop=0.2, double=0.5, late=0.2, corrupt_put=0.2), Cluster(one_sided=1.0)),
    "parcels": Scenario(
        Faults(late_put=0.1, double_put=0.1, late=0.05, cancel=0.2), Cluster(one_sided=0.0, decode_blocks=80)
    ),
    "hurry": Scenario(
        Faults(short_deadline=0.5), Cluster(num_prefill=1, num_decode=1, max_batch_tokens=16), rate=480.0
    ),
    "fences": Scenario(
        Faults(partition_every=0.15, late=0.2, double=0.2, freeze_every=1.0),
        Cluster(num_prefill=1),
        rate=200.0,
    ),
    "stalls": Scenario(
        Faults(drop=0.05, double=0.5, late=0.05, corrupt_put=0.2, freeze_in_put=0.1),
        Cluster(num_prefill=3, one_sided=1.0),
    ),
    "meetings": Scenario(
        Faults(mover_error=0.03, double=0.2, late=0.1, kill_every=0.3), Cluster(one_sided=1.0)
    ),
    "ahead": Scenario(
        Faults(late=0.1, drop=0.05, cancel=0.2, step_error=0.01, step_no_memory=0.01),
        Cluster(prefill_ahead=1.0),
    ),
    "coordinators": Scenario(Faults(coordinator_restart_every=2.5, cancel=0.1), Cluster(num_coordinators=3)),
    "keys": Scenario(
        Faults(coordinator_restart_every=0.4, cancel=0.05), Cluster(num_coordinators=3), keyed=1.0
    ),
    "odd": Scenario(cluster=Cluster(num_coordinators=2), keyed=0.7, odd=0.5),
    "flips": Scenario(FLIPS, Cluster(num_prefill=1, num_decode=1, num_flexible=3, one_sided=1.0)),
    "retirements": Scenario(
        Faults(flip_every=0.2, drop=0.3, partition_every=0.15, cancel=0.5),
        Cluster(num_prefill=1, num_decode=1, num_flexible=4, one_sided=1.0),
        rate=300.0,
    ),
    "mixed": Scenario(
        replace(MIXED, step_no_memory=0.01),
        Cluster(num_prefill=1, num_decode=1, num_mixed=2, prefill_blocks=80, decode_blocks=80),
    ),
    "borrowing": Scenario(
        replace(MIXED, kill_every=1.0, flip_every=0.3),
        Cluster(
            num_prefill=0,
            num_decode=1,
            num_borrowing=4,
            prefill_blocks=80,
            decode_blocks=80,
            max_batch_tokens=16,
        ),
        rate=200.0,
    ),
    "rendezvous": Scenario(RENDEZVOUS, Cluster(num_hosts=2, one_sided=0.0, rendezvous=1.0, walled=0.25)),
    "agents": Scenario(
        AGENTS, Cluster(num_prefill=3, num_hosts=2, one_sided=0.0, agents=1.0, decode_blocks=80)
    ),
    "copies": Scenario(
        replace(AGENTS, freeze_in_put=0.01, flip_every=0.5),
        Cluster(num_prefill=2, num_decode=1, num_flexible=2, one_sided=0.0, copies=1.0, decode_blocks=80),
    ),
    "broken movers": Scenario(
        Faults(broken_mover=0.6, late=0.05, drop=0.05, kill_every=0.5, freeze_every=0.8, cancel=0.1),
        Cluster(one_sided=1.0, rendezvous=0.5, agents=0.5, copies=0.5),
        product_limits=True,
    ),
    "names": Scenario(
        Faults(
            late_put=0.1,
            flip_every=0.3,
            coordinator_restart_every=1.0,
            coordinator_freeze_every=2.0,
            cancel=0.3,
            kill_every=2.0,
        ),
        Cluster(
            num_prefill=1,
            num_decode=1,
            num_flexible=3,
            num_hosts=2,
            one_sided=0.0,
            agents=1.0,
            decode_blocks=60,
        ),
    ),
    "clocks": Scenario(
        Faults(
            clock_jump_every=0.2, freeze_every=0.3, kill_every=3.0, coordinator_restart_every=6.0, cancel=0.1
        ),
        Cluster(num_decode=1, num_hosts=2),
        rate=30.0,
    ),
    "window": Scenario(
        replace(MIXED, drain_every=0.5, step_error=0.01, step_no_memory=0.01),
        Cluster(num_mixed=1, num_flexible=1, prefill_blocks=45, decode_blocks=24, window=18),
    ),
    "store": Scenario(
        Faults(spill_every=0.2, kill_every=0.8, freeze_every=1.0, drain_every=1.0, late=0.02, cancel=0.1),
        Cluster(num_mixed=1, num_flexible=1, prefill_blocks=40, decode_blocks=60, store=True),
    ),
    "adapters": Scenario(
        Faults(adapters_change_every=0.1, drop=0.005, late=0.02, kill_every=1.0, drain_every=1.0, cancel=0.1),
        Cluster(num_mixed=1, num_flexible=1, prefill_blocks=80, decode_blocks=60, adapters=2),
    ),
    "drafts": Scenario(
        replace(MIXED, drain_every=0.5, step_error=0.01, step_no_memory=0.01, coordinator_restart_every=2.0),
        Cluster(num_mixed=1, num_flexible=1, prefill_blocks=60, decode_blocks=40, drafts=4),
        keyed=0.5,
    ),
    "drafts of the model": Scenario(
        replace(MIXED, drain_every=0.5, step_error=0.02, step_no_memory=0.01),
        Cluster(num_decode=1, num_mixed=1, num_flexible=1, decode_blocks=40, drafts=4, mtp=True),
    ),
    "drafts in a window": Scenario(
        replace(MIXED, drain_every=0.5, step_error=0.01, step_no_memory=0.01),
        Cluster(num_mixed=1, prefill_blocks=45, decode_blocks=24, window=18, drafts=6),
    ),
    "states": Scenario(
        replace(MIXED, drain_every=0.5, step_error=0.01, step_no_memory=0.01),
        Cluster(num_mixed=1, num_flexible=1, prefill_blocks=60, decode_blocks=44, state_blocks=2),
        odd=0.1,
    ),
    "images": Scenario(
        replace(MIXED, drain_every=0.5, step_error=0.01, step_no_memory=0.01, coordinator_restart_every=2.0),
        Cluster(num_mixed=1, num_flexible=1, prefill_blocks=60, decode_blocks=44, drafts=2, images=True),
        keyed=0.5,
    ),
    "patience": Scenario(
        Faults(
            step_error=0.03,
            corrupt_put=0.2,
            partial_put=0.1,
            mover_error=0.05,
            step_no_memory=0.02,
            cancel=0.05,
        ),
        product_limits=True,
    ),
    "deaths": Scenario(
        Faults(kill_every=0.12, cancel=0.05), Cluster(num_prefill=2, num_decode=2), product_limits=True
    ),
    "poison": Scenario(Faults(poison=0.02), Cluster(num_prefill=3, num_decode=3), product_limits=True),
    "dispatchers": Scenario(
        Faults(
            late_turn=0.05,
            defect=0.01,
            sink_error=0.01,
            leave_in_push=0.02,
            kill_every=0.8,
            coordinator_freeze_every=1.0,
        ),
        Cluster(num_prefill=3, num_decode=3),
    ),
    "upgrades": Scenario(
        replace(MIXED, drain_every=0.4, kill_every=1.0, coordinator_restart_every=2.0, flip_every=1.0),
        Cluster(num_coordinators=2, num_flexible=1, num_mixed=1, rendezvous=0.3, next=0.5, num_far=2),
        keyed=0.5,
    ),
    "everything": Scenario(
        EVERYTHING,
        Cluster(num_coordinators=2, num_flexible=2, one_sided=1.0, rendezvous=0.5, copies=0.3, adapters=2),
        product_limits=True,
        keyed=0.5,
        odd=0.1,
    ),
}


OF_A_RENDEZVOUS = ("failed_rendezvous", "broken_communicator")
OF_A_DISPATCHER = ("late_turn", "defect", "sink_error", "leave_in_push")
DRAWN_ONE_BY_ONE = {
    *("flip_every", "lend_every", "poison", "clock_jump_every", "broken_mover", "adapters_change_every")
}
DRAWN_APART = {*DRAWN_ONE_BY_ONE, *OF_A_RENDEZVOUS, *OF_A_DISPATCHER}


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed: half of all faults, from half to twice as frequent as in ``EVERYTHING``. (What
    has generators of its own came later: the others go on drawing what they drew.) Decode workers are added
    until they can do what the clients ask for."""
    random = Random(f"scenario {seed}")
    chosen: dict[str, float] = {}
    for name, value in vars(EVERYTHING).items():
        if name not in DRAWN_APART and random.random() < 0.5:
            chosen[name] = value * 2 ** random.uniform(-1.0, 1.0)
    flips = Random(f"flips {seed}")
    if flexible := flips.random() < 0.4:
        chosen["flip_every"] = EVERYTHING.flip_every * 2 ** flips.uniform(-1.0, 1.0)
    meetings = Random(f"rendezvous {seed}")
    rendezvous = meetings.choice([0.0, 0.0, 0.5, 1.0])
    for name in OF_A_RENDEZVOUS if rendezvous else ():
        if meetings.random() < 0.7:
            chosen[name] = vars(EVERYTHING)[name] * 2 ** meetings.uniform(-1.0, 1.0)
    if (clocks := Random(f"clocks {seed}")).random() < 0.5:
        chosen["clock_jump_every"] = EVERYTHING.clock_jump_every * 2 ** clocks.uniform(-1.0, 1.0)
    if (broken := Random(f"broken movers {seed}")).random() < 0.3:
        chosen["broken_mover"] = broken.uniform(0.1, 1.0)
    if adapters := (changes := Random(f"adapters {seed}")).choice([0, 0, 0, 2, 3]):
        usual = EVERYTHING.adapters_change_every
        chosen["adapters_change_every"] = usual * 2 ** changes.uniform(-1.0, 1.0)
    dispatchers = Random(f"dispatchers {seed}")
    for name in OF_A_DISPATCHER:
        if dispatchers.random() < 0.4:
            chosen[name] = vars(EVERYTHING)[name] * 2 ** dispatchers.uniform(-1.0, 1.0)
    agents = Random(f"agents {seed}").choice([0.0, 0.0, 0.5, 1.0])
    limits = Random(f"limits {seed}")
    if (product_limits := limits.random() < 0.3) and limits.random() < 0.4:
        chosen["poison"] = EVERYTHING.poison * 2 ** limits.uniform(-1.0, 1.0)
    num_borrowing = Random(f"borrowing {seed}").choice([0, 0, 0, 0, 2, 3])
    if num_borrowing and (lends := Random(f"lends {seed}")).random() < 0.5:
        chosen["lend_every"] = EVERYTHING.lend_every * 2 ** lends.uniform(-1.0, 1.0)
    drafts = Random(f"drafts {seed}").choice([0, 0, 0, 4])
    state_blocks = Random(f"hybrid {seed}").choice([0, 0, 0, 0, 0, 1, 2])
    cluster = Cluster(
        num_mixed=Random(f"mixed {seed}").choice([0, 0, 0, 0, 1, 2]),
        num_borrowing=num_borrowing,
        rendezvous=rendezvous,
        agents=agents,
        copies=Random(f"copies {seed}").choice([0.0, 0.0, 0.0, 0.5, 1.0]),
        walled=meetings.choice([0.0, 0.0, 0.2]),
        num_flexible=flips.choice([1, 2, 3]) if flexible else 0,
        num_prefill=random.choice([1, 2, 2, 3]),
        num_decode=random.choice([1, 2, 2, 3]),
        num_hosts=random.choice([1, 1, 2]),
        one_sided=random.choice([0.0, 0.5, 1.0]),
        prefill_blocks=random.choice([40, 80, 160]),
        decode_blocks=random.choice([28, 80, 200]),
        max_num_seqs=random.choice([3, 8, 16]),
        max_batch_tokens=random.choice([16, 48, 96]),
        policy=random.choice(["hybrid", "hybrid", "round_robin", "least_loaded", "prefix", "sticky"]),
        num_coordinators=random.choice([1, 1, 2, 3]),
        prefill_ahead=random.choice([0.0, 0.5, 1.0]),
        window=Random(f"window {seed}").choice([0, 0, 0, 2, 18, 40]),
        drafts=drafts,
        mtp=drafts > 0 and Random(f"mtp {seed}").random() < 0.5,
        next=Random(f"next {seed}").choice([0.0, 0.0, 0.0, 0.3, 0.7]),
        store=Random(f"store {seed}").random() < 0.4,
        adapters=adapters,
        num_far=Random(f"far {seed}").choice([0, 0, 0, 0, 0, 2]),
    )
    if state_blocks:  # what such a model is refused
        cluster = replace(cluster, window=0, drafts=0, mtp=False, store=False, state_blocks=state_blocks)
        cluster = replace(cluster, decode_blocks=max(cluster.decode_blocks, 40))
    elif Random(f"images {seed}").random() < 0.2:  # an older build takes none
        sizes = {"decode_blocks": max(cluster.decode_blocks, 40), "next": 0.0, "num_far": 0}
        cluster = replace(cluster, mtp=False, images=True, **sizes)
    keyed = Random(f"keyed {seed}").choice([0.0, 0.0, 0.5, 1.0])
    odd = Random(f"odd {seed}").choice([0.0, 0.0, 0.3])
    rate = random.choice([120.0, 240.0, 480.0])
    drawn = Scenario(Faults(**chosen), cluster, rate, product_limits, keyed, odd)
    while decode_s(drawn, DRAWN_FOR) > MAX_DECODE_S:
        drawn = replace(drawn, cluster=replace(drawn.cluster, num_decode=drawn.cluster.num_decode + 1))
    return drawn
