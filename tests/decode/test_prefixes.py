"""A decode worker sends what it has cached only while its own sequences have blocks to grow into."""

from __future__ import annotations

import numpy as np
import pytest
from support.receivers import receiver

from splitserve.decode.core import DecodeCore
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import SamplingState, StepOutput
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import Meet, ModelIdentity, Peer, SamplingParams, SendPrefix

BLOCK, NUM_RUNNING = 4, 3
MODEL = ModelIdentity(kv_name="m", dtype="f", block_size=BLOCK, cache_map=states(1, 64), block_bytes=64)
HASHES = [bytes([n]) * 16 for n in range(6)]
ORDER = SendPrefix(
    coordinator=7,
    dispatch=9,
    block_hashes=b"".join(HASHES),
    prefill=Peer(worker_id="p", incarnation=1, address="tcp://p"),
)


@pytest.mark.parametrize(("num_free", "sends"), [(NUM_RUNNING, True), (NUM_RUNNING - 1, False)])
def test_no_sequence_leaves_for_the_sake_of_a_prefix(num_free: int, sends: bool) -> None:
    blocks = BlockManager(NUM_RUNNING + len(HASHES) + num_free)
    scheduler = DecodeScheduler(blocks, BLOCK, 8, 64, frozenset())
    meet = Meet(worker_id="d", incarnation=1, host="h", pid=1, model=MODEL, movers=("tcp",))
    core = DecodeCore(meet, scheduler, receiver(meet, blocks))
    cached = blocks.allocate(len(HASHES)) or []
    blocks.commit_all(cached, HASHES, None)
    blocks.release(cached)
    for n in range(NUM_RUNNING):
        state = SamplingState(SamplingParams(max_tokens=20), [1, 2, 3], [9])
        scheduler.join((7, n), f"r{n}", state, blocks.allocate(1) or [], b"root", 100.0)
    core.from_coordinator(ORDER, 0.0)
    assert bool(list(core.prefixes.block_tables())) == sends
    for _ in range(BLOCK):  # each sequence begins a block
        step = core.schedule(0.0)
        assert step is not None
        core.complete(step, StepOutput(np.full(step.batch.num_seqs, 5, np.int32)), 0.0)
    assert scheduler.num_preemptions == 0
