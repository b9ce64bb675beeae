"""Bugs for test_teeth.py, put into what reads cached blocks from the KV store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from splitserve.engine.cache.offload import Offload
from splitserve.prefill.stored_prefixes import StoredPrefixes

Patch = pytest.MonkeyPatch


def find_blocks_before_they_are_filled(patch: Patch) -> None:
    arrived = StoredPrefixes.arrived

    def broken(self: Any, key: Any, count: int) -> list[int]:
        if blocks := arrived(self, key, count):
            self.filled(key, count)
        return blocks

    filled = StoredPrefixes.filled

    def once(self: Any, key: Any, count: int) -> None:
        if key in self._reading and self._reading[key].blocks:
            filled(self, key, count)

    patch.setattr(StoredPrefixes, "arrived", broken)
    patch.setattr(StoredPrefixes, "filled", once)


def leak_the_blocks_of_a_prompt_that_ends(patch: Patch) -> None:
    def broken(self: Any, *keys: Any) -> None:
        for key in keys:
            self._reading.pop(key, None)

    patch.setattr(StoredPrefixes, "end", broken)


def put_a_group_in_the_place_of_the_next(patch: Patch) -> None:
    take = StoredPrefixes.take_orders
    patch.setattr(StoredPrefixes, "take_orders", lambda self: take(self)[::-1])


def write_blocks_under_the_names_of_others(patch: Patch) -> None:
    take = Offload.take

    def broken(self: Any, count: int, idle: bool) -> Any:
        hashes, blocks = take(self, count, idle)
        return hashes, blocks[::-1]

    patch.setattr(Offload, "take", broken)


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (find_blocks_before_they_are_filled, "store"),
    (leak_the_blocks_of_a_prompt_that_ends, "store"),
    (put_a_group_in_the_place_of_the_next, "store"),
    (write_blocks_under_the_names_of_others, "store"),
]
"""Each with the scenario in which it is found quickly."""
