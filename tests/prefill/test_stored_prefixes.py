"""Cached blocks from the KV store: a prompt waits for them no longer than it would compute them."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from support.prefix_rig import BLOCK, MODEL, PROMPT, SPEC
from support.receivers import receiver

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import StepOutput
from splitserve.prefill.core import PrefillCore
from splitserve.prefill.prefix_waits import MAX_LATE, PAUSE_S, UNSEEN_S
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.prefill.stored_prefixes import ReadSizes
from splitserve.transport.messages.blocks import chain, root_hash
from splitserve.transport.messages.messages import Cancel, Drain, Meet, Prefill, Release, u32

TOKENS = u32(range(90))
HASHES = chain(root_hash("m"), TOKENS, BLOCK)
GROUP, AHEAD = 2, 4


def prompt(dispatch: int, num_tokens: int = 90, **more: object) -> Prefill:
    spec = replace(SPEC, request_id=f"r{dispatch}", dispatch=dispatch, num_prompt_tokens=num_tokens)
    spec = replace(spec, token_ids=TOKENS[: 4 * num_tokens], **more)
    return replace(PROMPT, spec=spec, num_prefix_blocks=0)


class Worker:
    """A prefill worker with a KV store that has the first blocks of all prompts."""

    def __init__(self, num_stored: int, num_blocks: int = 64) -> None:
        meet = Meet(worker_id="p", incarnation=1, host="h", pid=1, model=MODEL, movers=("tcp",))
        self.scheduler = PrefillScheduler(BlockManager(num_blocks), BLOCK, "m", 128, 4)
        arrivals = receiver(meet, self.scheduler.blocks, lambda: self.core.room())
        self.core = PrefillCore(
            meet, self.scheduler, arrivals, frozenset(), 100, stored=ReadSizes(GROUP, AHEAD)
        )
        self.blocks, self.num_stored = self.scheduler.blocks, num_stored
        self.num_reads = self.most_ahead = 0

    def read(self, most: int = 100) -> None:
        """Carry out up to ``most`` reads."""
        orders = self.core.stored.take_orders()
        while orders and most:
            self.most_ahead = max(self.most_ahead, len(orders))
            key, hashes = orders.pop(0)
            self.num_reads, most = self.num_reads + 1, most - 1
            first = HASHES.index(hashes[0])
            count = max(0, min(len(hashes), self.num_stored - first))
            if blocks := self.core.stored.arrived(key, count):
                assert len(blocks) == count
                self.core.stored.filled(key, count)
            orders += self.core.stored.take_orders()

    def num_computed(self, now: float = 0.0) -> int:
        """Tokens of the next step; 0: all wait."""
        step = self.core.schedule(now)
        if step is None:
            return 0
        self.core.complete(step, StepOutput(np.full(step.batch.num_seqs, 5, np.int32)), now)
        return step.batch.num_tokens

    def counters(self) -> tuple[float, float]:
        found = self.core.load().counters
        return found["loaded_tokens"], found["late_loads"]


@pytest.mark.parametrize("num_stored", [0, 1, 2, 7, 8, 21, 22])
def test_a_prompt_waits_for_what_the_store_has_and_computes_the_rest(num_stored: int) -> None:
    worker = Worker(num_stored)
    worker.core.from_coordinator(prompt(1), 0.0)
    assert worker.num_computed() == 0, "it waits"
    worker.read()
    assert worker.num_computed() == 90 - num_stored * BLOCK
    assert worker.counters() == (num_stored * BLOCK, 0)
    assert not list(worker.core.stored.block_tables())
    assert worker.blocks.num_used == -(-90 // BLOCK), "the prompt's own"


def test_a_miss_costs_one_read_and_a_hit_has_several_under_way() -> None:
    worker = Worker(0)
    worker.core.from_coordinator(prompt(1), 0.0)
    worker.read()
    assert worker.num_reads == 1
    worker = Worker(22)
    worker.core.from_coordinator(prompt(1), 0.0)
    worker.read()
    assert (worker.num_reads, worker.most_ahead) == (11, AHEAD)


def test_what_is_cached_is_not_read() -> None:
    worker = Worker(22)
    blocks = worker.blocks.allocate(22) or []
    worker.blocks.commit_all(blocks, HASHES, None)
    worker.blocks.release(blocks)
    worker.core.from_coordinator(prompt(1), 0.0)
    assert worker.num_computed() == 2
    worker.core.from_coordinator(prompt(2, 3), 0.0)
    worker.core.from_coordinator(prompt(3, prompt_logprobs=0), 0.0)
    assert worker.num_computed() == 93, "shorter than a block; its own logprobs are wanted"
    assert worker.core.stored.take_orders() == []


def test_what_is_cached_stays_while_the_rest_is_read() -> None:
    worker = Worker(22, num_blocks=26)
    blocks = worker.blocks.allocate(4) or []
    worker.blocks.commit_all(blocks, HASHES[:4], None)
    worker.blocks.release(blocks)
    worker.core.from_coordinator(prompt(1), 0.0)
    assert worker.blocks.num_used == 4
    worker.read()
    assert worker.num_computed() == 2
    assert worker.counters() == (18 * BLOCK, 0)


def test_a_prompt_that_has_waited_long_enough_computes_and_keeps_what_came() -> None:
    worker = Worker(22)
    worker.core.from_coordinator(prompt(1), 0.0)
    worker.read(1)
    worker.core.tick(UNSEEN_S)
    assert worker.num_computed(UNSEEN_S) == 90 - GROUP * BLOCK
    worker.read()
    assert worker.counters() == (GROUP * BLOCK, 1)
    assert not list(worker.core.stored.block_tables())


def test_a_slow_store_is_left_alone_for_a_while() -> None:
    worker, now = Worker(22), 0.0
    for dispatch in range(MAX_LATE):
        worker.core.from_coordinator(prompt(dispatch), now)
        now += UNSEEN_S
        assert worker.num_computed(now) > 0
        worker.core.drop_others()
        worker.blocks.allocate(64)
        worker.blocks.release(list(range(64)))
    worker.core.from_coordinator(prompt(7), now)
    assert worker.num_computed(now) == 90, "nothing is waited for"
    worker.core.drop_others()
    worker.blocks.allocate(64)
    worker.blocks.release(list(range(64)))
    worker.core.from_coordinator(prompt(8), now + PAUSE_S)
    worker.read()
    assert worker.num_computed(now + PAUSE_S) == 2


def test_two_prompts_that_begin_alike_read_once() -> None:
    worker = Worker(22)
    worker.core.from_coordinator(prompt(1), 0.0)
    worker.core.from_coordinator(prompt(2), 0.0)
    worker.read()
    assert worker.num_reads == 11
    assert worker.num_computed() == 4, "both begin"


def test_what_no_worker_sends_any_more_is_looked_up() -> None:
    worker = Worker(22)
    pulled = replace(prompt(1), num_prefix_blocks=22)
    worker.core.from_coordinator(pulled, 0.0)
    assert worker.core.stored.take_orders() == [], "another worker sends it"
    refused = Release(lease=0, coordinator=7, dispatch=1)
    worker.core.from_peer(("q", 1), refused, 0.0)
    worker.core.take(0.0)
    worker.core.from_peer(("q", 1), refused, 0.0)
    worker.core.take(0.0)
    worker.read()
    assert worker.num_computed() == 2
    assert worker.counters() == (22 * BLOCK, 0)


@pytest.mark.parametrize("end", ["cancelled", "drained", "deadline"])
def test_a_prompt_that_ends_releases_what_it_has_read_and_others_go_on(end: str) -> None:
    worker = Worker(22)
    worker.core.from_coordinator(prompt(1, deadline_s=0.5), 0.0)
    worker.read(1)
    worker.core.from_coordinator(prompt(2), 0.0)
    if end == "cancelled":
        worker.core.from_coordinator(Cancel(coordinator=7, dispatches=u32([1])), 0.0)
    elif end == "drained":
        worker.core.from_coordinator(Drain(coordinator=7, timeout_s=9.0), 0.0)
    else:
        worker.core.tick(0.5)
    worker.read()
    assert not list(worker.core.stored.block_tables())
    if end == "drained":
        assert worker.core.at_rest
        assert worker.blocks.num_used == 0
    else:
        assert worker.num_computed(0.6) == 90 - GROUP * BLOCK


def test_two_prompts_that_wait_for_blocks_of_each_other_begin_one_after_the_other() -> None:
    worker = Worker(6, num_blocks=28)
    worker.core.from_coordinator(prompt(1), 0.0)
    worker.core.from_coordinator(prompt(2, salt=b"other"), 0.0)
    for key, _ in worker.core.stored.take_orders():
        for _ in range(3):
            assert worker.core.stored.arrived(key, 2)
            worker.core.stored.filled(key, 2)
    worker.core.tick(UNSEEN_S)
    assert worker.num_computed(UNSEEN_S) > 0, "neither holds what the other needs"


def test_a_cache_without_room_reads_nothing() -> None:
    worker = Worker(22, num_blocks=30)
    others = worker.blocks.allocate(29) or []
    worker.core.from_coordinator(prompt(1), 0.0)
    worker.read()
    assert worker.counters()[0] == 0
    worker.blocks.release(others)
    assert worker.num_computed() == 90


def test_what_comes_after_its_prompt_has_stopped_waiting_is_taken_for_no_other_block() -> None:
    worker = Worker(22, num_blocks=26)
    others = worker.blocks.allocate(5) or []
    worker.core.from_coordinator(prompt(1), 0.0)
    ((key, hashes),) = worker.core.stored.take_orders()
    worker.core.tick(UNSEEN_S)
    assert worker.num_computed(UNSEEN_S) == 0, "there is no room"
    worker.blocks.commit_all(others[:GROUP], hashes, None)
    worker.core.from_peer(("q", 1), Release(lease=0, coordinator=7, dispatch=1), UNSEEN_S)
    worker.core.take(UNSEEN_S)
    assert worker.core.stored.arrived(key, GROUP) == []
