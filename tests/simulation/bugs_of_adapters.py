"""Bugs for test_teeth.py, put into what serves adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from splitserve.coordinator.lifecycle import request
from splitserve.coordinator.lifecycle.worker import WorkerRecord
from splitserve.decode import core, moving, rows
from splitserve.engine.adapters.slots import AdapterSlots, RoleAdapters
from splitserve.prefill import scheduler

Patch = pytest.MonkeyPatch


def name_blocks_alike_whatever_the_adapter(patch: Patch) -> None:
    root_hash = scheduler.root_hash
    for module in (scheduler, core, moving, request):
        patch.setattr(module, "root_hash", lambda kv_name, salt=b"", adapter="": root_hash(kv_name, salt))


def compute_without_an_adapter_that_is_not_here(patch: Patch) -> None:
    patch.setattr(RoleAdapters, "has", lambda self, content: True)


def generate_without_the_adapter(patch: Patch) -> None:
    patch.setattr(rows, "adapters_of", lambda *names: ())


def replace_an_adapter_while_it_is_used(patch: Patch) -> None:
    patch.setattr(RoleAdapters, "in_use", frozenset())


def keep_the_blocks_of_a_sequence_that_is_given_back(patch: Patch) -> None:
    patch.setattr(core, "held", lambda blocks: [])


def never_give_up_a_slot(patch: Patch) -> None:
    patch.setattr(AdapterSlots, "give_up", lambda self, in_use, reported: None)


def report_adapters_once(patch: Patch) -> None:
    take = RoleAdapters.take

    def broken(self: Any, everything: bool) -> Any:
        return take(self, everything) if everything else None

    patch.setattr(RoleAdapters, "take", broken)


def send_requests_to_workers_without_their_adapter(patch: Patch) -> None:
    patch.setattr(WorkerRecord, "has", lambda self, adapter: True)


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (name_blocks_alike_whatever_the_adapter, "adapters"),
    (compute_without_an_adapter_that_is_not_here, "adapters"),
    (generate_without_the_adapter, "adapters"),
    (replace_an_adapter_while_it_is_used, "adapters"),
    (keep_the_blocks_of_a_sequence_that_is_given_back, "adapters"),
    (never_give_up_a_slot, "adapters"),
    (report_adapters_once, "adapters"),
    (send_requests_to_workers_without_their_adapter, "adapters"),
]
"""Each with the scenario in which it is found quickly."""
