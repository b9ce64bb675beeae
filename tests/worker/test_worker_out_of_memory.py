"""A worker whose step runs out of memory gives some sequences back and lives on: the real loop, its threads
and its sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from support.worker_pair import DEADLINE_S, WorkerPair, spec

from splitserve.bench.null_workers import NullRunner
from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.transport.messages.messages import (
    FirstToken,
    Joined,
    Message,
    RequestFailed,
    StepTokens,
    from_u32,
)

NUM_SEQS = 4


class Greedy(NullRunner):
    """Needs more memory than there is for steps of more than ``room`` sequences. Begins when it
    ``may_begin``."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.num_failed = 0
        self.may_begin = threading.Event()

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        assert self.may_begin.wait(DEADLINE_S)
        if batch.num_seqs > self.room:
            self.num_failed += 1
            raise MemoryError
        return super().execute(batch, on_layer)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_step_out_of_memory_does_not_end_the_worker(role: str) -> None:
    short = Greedy(room=2 if role == "decode" else 1)
    with WorkerPair(runners={role: short}) as pair:
        pair.ask(*map(spec, range(NUM_SEQS)))
        if role == "decode":  # else the first ones may be through before the others join
            pair.until(lambda: sum(isinstance(m, Joined) for m in pair.received) == NUM_SEQS)
        short.may_begin.set()
        pair.until(lambda: _served(pair.received, role))
        assert short.num_failed
        assert pair.threads[role].is_alive()
    failed = [m for m in pair.received if isinstance(m, RequestFailed)]
    assert all(m.kind == "preempted" for m in failed)
    assert bool(failed) == (role == "decode")  # a prefill step is done again in smaller ones


def _served(received: list[Message], role: str) -> bool:
    """decode: what stayed goes on while the rest was given back. prefill: every prompt has its first
    token."""
    if role == "prefill":
        return len({m.dispatch for m in received if isinstance(m, FirstToken)}) == NUM_SEQS
    given_back = {m.dispatch for m in received if isinstance(m, RequestFailed)}
    steps = [m for m in received if isinstance(m, StepTokens)]
    return bool(given_back) and bool(steps) and len(set(from_u32(steps[-1].dispatches)) - given_back) > 0
