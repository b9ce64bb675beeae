"""The simulator finds bugs: each of these, put in on purpose, is caught within a few seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from simulation.test_faults import CORRUPTION, EVERYTHING, NETWORK, PROCESSES, simulate
from simulation.world import Faults

from splitserve.coordinator.lifecycle import Lifecycle
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.prefill.core import PrefillCore
from splitserve.transport.handoff_receiver import HandoffReceiver
from splitserve.transport.handoff_sender import HandoffSender

MAX_SEEDS = 12
Patch = pytest.MonkeyPatch


def reuse_blocks_that_a_stalled_writer_may_still_write(patch: Patch) -> None:
    end = HandoffReceiver._end

    def broken(self: HandoffReceiver, incoming: Any, reason: str) -> None:
        self._one_sided[incoming.peer] = False
        end(self, incoming, reason)
        self._one_sided[incoming.peer] = True

    patch.setattr(HandoffReceiver, "_end", broken)


def believe_corrupt_blocks(patch: Patch) -> None:
    verified = HandoffReceiver.verified
    patch.setattr(HandoffReceiver, "verified", lambda self, lease, positions, wrong, now: verified(self, lease, positions, [], now))


def pass_on_tokens_whatever_their_index(patch: Patch) -> None:
    def broken(self: Lifecycle, flight: Any, index: int, token: int, logprobs: Any, reason: Any, now: float) -> None:
        self._push(flight, token, logprobs, reason, now)

    patch.setattr(Lifecycle, "_unusual_row", broken)


def dispatch_again_without_the_tokens_the_client_has(patch: Patch) -> None:
    from splitserve.coordinator.flight import Flight
    from splitserve.transport.messages import u32

    patch.setattr(Flight, "column", lambda self: u32(self.request.prompt_token_ids))


def never_free_a_cancelled_prompt(patch: Patch) -> None:
    patch.setattr(PrefillCore, "_drop", lambda self, key: self.sender.abandon(key))


def free_blocks_in_the_middle_of_a_step(patch: Patch) -> None:
    drop = DecodeScheduler.drop

    def broken(self: DecodeScheduler, key: Any) -> bool:
        sequence = self._by_key.get(key)
        if sequence is not None and self._in_step and sequence.row >= 0:
            self.blocks.release(sequence.blocks)
            sequence.blocks = []
        return drop(self, key)

    patch.setattr(DecodeScheduler, "drop", broken)


def never_repeat_what_was_not_answered(patch: Patch) -> None:
    patch.setattr(HandoffSender, "tick", lambda self, now: None)


def let_leases_run_on(patch: Patch) -> None:
    patch.setattr(HandoffReceiver, "tick", lambda self, now: self.grant_waiting(now))


FEW_BLOCKS = {"prefill_blocks": 40, "decode_blocks": 24}
BUGS: list[tuple[Callable[[Patch], None], Faults]] = [
    (reuse_blocks_that_a_stalled_writer_may_still_write, Faults(freeze_in_put=0.02, freeze_every=4.0)),
    (believe_corrupt_blocks, CORRUPTION),
    (pass_on_tokens_whatever_their_index, NETWORK),
    (dispatch_again_without_the_tokens_the_client_has, PROCESSES),
    (never_free_a_cancelled_prompt, NETWORK),
    (free_blocks_in_the_middle_of_a_step, Faults(cancel=0.6)),
    (never_repeat_what_was_not_answered, NETWORK),
    (let_leases_run_on, Faults(freeze_in_put=0.02, freeze_every=2.0)),
]


@pytest.mark.parametrize(("bug", "faults"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_a_deliberate_bug_is_found(bug: Callable[[Patch], None], faults: Faults, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    sizes = FEW_BLOCKS if bug is free_blocks_in_the_middle_of_a_step else {}
    for seed in range(MAX_SEEDS):
        try:
            world = simulate(seed, faults, requests=100, **sizes)
        except (AssertionError, IndexError, KeyError):
            return  # an invariant inside a core spoke first
        if world.violations:
            return
    pytest.fail(f"not found within {MAX_SEEDS} seeds")


def test_everything_else_is_sound() -> None:
    assert not simulate(5, EVERYTHING).violations
