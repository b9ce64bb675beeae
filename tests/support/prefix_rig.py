"""Two prefill workers' cores: one has the first blocks of a prompt cached, the other one computes it."""

from __future__ import annotations

import numpy as np
from support.receivers import receiver

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import StepOutput
from splitserve.prefill.core import PrefillCore
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport.handoff import protocol as act
from splitserve.transport.messages.blocks import chain, root_hash
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import (
    FROM_DECODE,
    Meet,
    ModelIdentity,
    Peer,
    Placed,
    Prefill,
    RequestSpec,
    SamplingParams,
    SendPrefix,
    u32,
    u64,
)

BLOCK, CACHED, TOKENS = 4, 5, u32(range(30))
MODEL = ModelIdentity(kv_name="m", dtype="f", block_size=BLOCK, cache_map=states(1, 64), block_bytes=64)
HASHES = chain(root_hash("m"), TOKENS, BLOCK)[:CACHED]
KEY = (7, 1)
SPEC = RequestSpec(
    request_id="r", epoch=0, dispatch=1, coordinator=7, token_ids=TOKENS, num_prompt_tokens=30,
    sampling=SamplingParams(max_tokens=9), deadline_s=60.0,
)  # fmt: skip
PROMPT = Prefill(
    spec=SPEC, decode=Peer(worker_id="d", incarnation=1, address="tcp://d"), num_prefix_blocks=CACHED
)
ORDER = SendPrefix(
    coordinator=7,
    dispatch=1,
    block_hashes=b"".join(HASHES),
    prefill=Peer(worker_id="p", incarnation=1, address="tcp://p"),
)


def core(name: str) -> PrefillCore:
    meet = Meet(worker_id=name, incarnation=1, host="h", pid=1, model=MODEL, movers=("tcp",))
    scheduler = PrefillScheduler(BlockManager(20), BLOCK, "m", 64, 4)
    arrivals = receiver(meet, scheduler.blocks, lambda: made.room())
    made = PrefillCore(meet, scheduler, arrivals, frozenset(), 100)
    return made


class Rig:
    """``source`` has the first blocks of a prompt cached; ``prefill`` is to compute it."""

    def __init__(self, num_cached: int = CACHED) -> None:
        self.now, self.source, self.prefill = 0.0, core("q"), core("p")
        blocks = self.source.blocks.allocate(num_cached) or []
        self.source.blocks.commit_all(blocks, HASHES[:num_cached], None)
        self.source.blocks.release(blocks)
        self.num_put, self.loses, self.corrupt = 0, (), False

    def settle(self) -> None:
        """Carry messages and blocks between both until nothing is under way."""
        while self._carry(self.source, self.prefill) + self._carry(self.prefill, self.source):
            pass

    def _carry(self, here: PrefillCore, there: PrefillCore) -> int:
        here.prefixes.advance(2, self.now)
        actions = here.take(self.now)
        for action in actions:
            if isinstance(action, act.Put):
                for position, _, _ in action.items:
                    self.num_put += 1
                    there.receiver.arrived(action.lease, position)
            elif isinstance(action, act.SendPlaced):
                sums = u64(action.source_blocks)
                self._send(here, there, Placed(lease=action.lease, first=action.first, checksums=sums))
            elif isinstance(action, act.SendHandoff):
                self._send(here, there, action.message(u64(action.source_blocks), self.now))
            elif isinstance(action, act.Verify):
                wrong = action.positions if self.corrupt else []
                here.receiver.verified(action.lease, action.positions, wrong, self.now)
            elif isinstance(action, act.ToPeer) and action.peer[0] in "pq":
                self._send(here, there, action.message)
        return len(actions)

    def _send(self, here: PrefillCore, there: PrefillCore, message: object) -> None:
        if isinstance(message, self.loses):
            return
        if isinstance(message, FROM_DECODE):
            there.sender.receive(here.worker, message, self.now)
        else:
            there.from_peer(here.worker, message, self.now)  # type: ignore[arg-type]

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for one in (self.source, self.prefill):
            one.tick(self.now)
        self.settle()

    def num_computed(self) -> int:
        """Tokens of the prompt's first step; 0: it waits."""
        step = self.prefill.schedule(self.now)
        if step is None:
            return 0
        self.prefill.complete(step, StepOutput(np.full(step.batch.num_seqs, 5, np.int32)), self.now)
        return step.batch.num_tokens

    def holds_nothing(self) -> bool:
        """Whether the source has released what it sent."""
        return not list(self.source.prefixes.block_tables()) and self.source.blocks.num_used == 0
