"""Deliberate bugs in what borrows: when, which process and how much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from splitserve.coordinator.lifecycle.placement import Placement
from splitserve.coordinator.lifecycle.pools import Pools
from splitserve.coordinator.lifecycle.worker import WorkerRecord
from splitserve.worker.loop import Worker

Patch = pytest.MonkeyPatch


def borrow_before_the_pools_are_tried(patch: Patch) -> None:
    choose, borrow = Placement._choose_pair, Placement._choose_borrower
    patch.setattr(
        Placement, "_choose_pair", lambda self, request: borrow(self, request) or choose(self, request)
    )


def keep_sequences_in_all_of_the_memory(patch: Patch) -> None:
    max_tokens = WorkerRecord._max_sequence_tokens

    def broken(self: Any) -> int:
        is_reserve, self.is_reserve = self.is_reserve, False
        found = max_tokens(self)
        self.is_reserve = is_reserve
        return found

    patch.setattr(WorkerRecord, "_max_sequence_tokens", broken)


def give_borrowed_work_to_a_process_that_drains(patch: Patch) -> None:
    def broken(self: Any) -> Any:
        for reserve in [w for w in self.workers.values() if w.is_reserve]:
            if (home := self._home_of.get((reserve.hello.process, reserve.hello.pid))) is not None:
                yield (reserve, home) if reserve.role == "prefill" else (home, reserve)

    patch.setattr(Pools, "borrowers", broken)


def pair_the_roles_of_two_processes(patch: Patch) -> None:
    borrowers = Pools.borrowers

    def broken(self: Any) -> Any:
        found = list(borrowers(self))
        return iter([(one, other) for one, _ in found for _, other in found])

    patch.setattr(Pools, "borrowers", broken)


def end_one_role_of_a_process_that_borrows(patch: Patch) -> None:
    patch.setattr(Worker, "_end_together", lambda self, now: None)


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (borrow_before_the_pools_are_tried, "borrowing"),
    (keep_sequences_in_all_of_the_memory, "borrowing"),
    (give_borrowed_work_to_a_process_that_drains, "borrowing"),
    (pair_the_roles_of_two_processes, "borrowing"),
    (end_one_role_of_a_process_that_borrows, "borrowing"),
]
"""Each with the scenario in which it is found quickly."""
