"""A request that is cancelled, at whatever moment, holds no block on either side a tenth of a second
later."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from msgspec.structs import replace
from support.receivers import receiver

from splitserve.decode.core import DecodeCore
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.prefill.core import PrefillCore
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport.handoff import protocol as act
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import (
    FROM_DECODE,
    Cancel,
    Meet,
    ModelIdentity,
    Peer,
    Placed,
    Prefill,
    RequestSpec,
    SamplingParams,
    u32,
    u64,
)
from splitserve.transport.movers.interface import ONE_SIDED_MOVERS

BLOCK, TURN_S, WITHIN_S, PROMPT = 4, 0.005, 0.1, 21
MODEL = ModelIdentity(kv_name="m", dtype="float32", block_size=BLOCK, cache_map=states(1, 64), block_bytes=64)
STEP_TURNS = 3
EVERY_STATE = {
    "queued",
    "computing",
    "waiting for grant",
    "sending",
    "verifying",
    "quarantined",
    "decoding",
    "draining",
}


class Side:
    """A worker's core, and the step that it is in."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.step: Any = None
        self.ends_at = 0

    def compute(self, turn: int, now: float) -> None:
        if self.step is not None and turn >= self.ends_at:
            batch: Batch = self.step.batch
            step, self.step = self.step, None
            self.core.complete(step, StepOutput(np.full(batch.num_seqs, 5, np.int32)), now)
        if self.step is None and (step := self.core.schedule(now)) is not None:
            self.step, self.ends_at = step, turn + STEP_TURNS


class System:
    """A prefill and a decode worker; messages, puts and checks arrive in the
    next turn."""

    def __init__(self, mover: str, full: bool) -> None:
        self.turn, self.now = 0, 0.0
        self.events: list[tuple[int, Any]] = []  # (turn, what to call)
        self.seen: set[str] = set()
        self.one_sided = mover in ONE_SIDED_MOVERS
        self.prefill_blocks, self.decode_blocks = BlockManager(16), BlockManager(16)
        meet = Meet(worker_id="p", incarnation=1, host="h", pid=1, model=MODEL, movers=(mover,))
        prompts = PrefillScheduler(self.prefill_blocks, BLOCK, "m", 8, 4)
        prefill = PrefillCore(meet, prompts, receiver(meet, self.prefill_blocks), frozenset(), 64)
        scheduler = DecodeScheduler(self.decode_blocks, BLOCK, 4, 64, frozenset())
        meet = replace(meet, worker_id="d")
        arrivals = receiver(meet, self.decode_blocks, lambda: decode.room(), (mover,))
        decode = DecodeCore(meet, scheduler, arrivals)
        self.p, self.d = Side(prefill), Side(decode)
        self.others = self.decode_blocks.allocate(14) if full else None

    def start(self, epoch: int = 0) -> None:
        spec = RequestSpec(
            request_id="r",
            epoch=epoch,
            dispatch=1 + epoch,
            coordinator=7,
            token_ids=u32(list(range(1, PROMPT + 1))),
            num_prompt_tokens=PROMPT,
            sampling=SamplingParams(max_tokens=40, temperature=0.0),
            deadline_s=99.0,
        )
        self.p.core.from_coordinator(
            Prefill(spec=spec, decode=Peer(worker_id="d", incarnation=1, address="x")), self.now
        )

    def cancel(self, prefill_receives_after: int) -> None:
        cancel = Cancel(coordinator=7, dispatches=u32([1]))
        self.d.core.from_coordinator(cancel, self.now)
        self.after(prefill_receives_after, lambda: self.p.core.from_coordinator(cancel, self.now))

    def after(self, turns: int, event: Any) -> None:
        self.events.append((self.turn + turns, event))

    def one_turn(self) -> None:
        self.turn, self.now = self.turn + 1, self.now + TURN_S
        due = [event for turn, event in self.events if turn <= self.turn]
        self.events = [(turn, event) for turn, event in self.events if turn > self.turn]
        for event in due:
            event()
        for side in (self.p, self.d):
            side.core.tick(self.now)
            side.compute(self.turn, self.now)
            self._carry_out(side)
        self._look()

    def _carry_out(self, side: Side) -> None:
        me, other = (("p", 1), self.d) if side is self.p else (("d", 1), self.p)
        for action in side.core.take(self.now):
            match action:
                case act.ToPeer(message=message):
                    self._send(other, me, message)
                case act.SendPlaced():
                    self._send(
                        other,
                        me,
                        Placed(lease=action.lease, first=action.first, checksums=u64(action.source_blocks)),
                    )
                case act.SendHandoff():
                    sums = u64(action.source_blocks)
                    self._send(other, me, action.message(sums, 0.0))
                case act.Put() if not self.one_sided:
                    for position, _, _ in action.items:
                        self.after(2, lambda a=action, i=position: self.d.core.receiver.arrived(a.lease, i))
                case act.Verify():
                    self.after(
                        2, lambda a=action: self.d.core.receiver.verified(a.lease, a.positions, [], self.now)
                    )

    def _send(self, to: Side, me: tuple[str, int], message: Any) -> None:
        assert isinstance(message, FROM_DECODE) == (to is self.p)
        receive = self.p.core.sender.receive if to is self.p else self.d.core.from_peer
        self.after(1, lambda: receive(me, message, self.now))

    def _look(self) -> None:
        """Which states there have been."""
        prefill, receiver = self.p.core.scheduler, self.d.core.receiver
        quarantined = bool(receiver.leases.num_blocks) and not receiver.leases.granted
        states = {
            "queued": bool(prefill.waiting),
            "computing": self.p.step is not None,
            "waiting for grant": bool(receiver.granting.waiting),
            "sending": bool(receiver.leases.granted),
            "verifying": bool(receiver.leases.granted and prefill.pinned),
            "quarantined": quarantined,
            "decoding": bool(self.d.core.scheduler.num_running),
            "draining": self.d.core.load().draining,
        }
        self.seen |= {name for name, there in states.items() if there}

    @property
    def num_used(self) -> tuple[int, int]:
        return self.prefill_blocks.num_used, self.decode_blocks.num_used - len(self.others or ())


def cancelled_at(moment: int, system: System, prefill_receives_after: int) -> set[str]:
    """Cancel after ``moment`` turns; return the states passed through."""
    if moment % 2:
        system.after(40, lambda: system.d.core.drain(system.now, 50.0))
    system.start()
    system._look()
    for _ in range(moment):
        system.one_turn()
    system.cancel(prefill_receives_after)
    for _ in range(int(WITHIN_S / TURN_S)):
        system.one_turn()
    assert system.num_used == (0, 0), f"moment {moment}: {system.seen}"
    assert not system.p.core.scheduler.held
    assert not system.d.core.load().dispatches
    return system.seen


def test_cancelled_at_any_moment_in_any_state() -> None:
    seen: set[str] = set()
    for mover, full, prefill_receives_after in itertools.product(("shm", "tcp"), (False, True), (1, 4)):
        for moment in range(60):
            seen |= cancelled_at(moment, System(mover, full), prefill_receives_after)
    assert seen == EVERY_STATE


def test_a_new_attempt_takes_the_place_of_one_that_still_runs_here() -> None:
    """Its Cancel was lost, with the connection."""
    system = System("tcp", full=False)
    for epoch in (0, 1):
        system.start(epoch)
        for _ in range(40):
            system.one_turn()
        assert system.d.core.held == [(7, 1 + epoch)]
