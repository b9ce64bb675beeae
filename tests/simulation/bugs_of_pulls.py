"""Bugs for test_teeth.py, put into what sends cached blocks to a prefill worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from splitserve.prefill.core import PrefillCore
from splitserve.transport.handoff.prefixes import PrefixSender
from splitserve.transport.handoff.receiver import HandoffReceiver

Patch = pytest.MonkeyPatch


def release_a_prefix_before_it_has_arrived(patch: Patch) -> None:
    begin = PrefixSender.begin

    def broken(self: Any, order: Any, now: float) -> None:
        begin(self, order, now)
        self.end((order.coordinator, order.dispatch))

    patch.setattr(PrefixSender, "begin", broken)


def keep_a_prefix_that_is_not_verified(patch: Patch) -> None:
    conclude = HandoffReceiver._conclude

    def broken(self: Any, incoming: Any, now: float) -> None:
        if incoming.is_prefix and incoming.handoff is not None:
            self.leases.keep(incoming)
        else:
            conclude(self, incoming, now)

    patch.setattr(HandoffReceiver, "_conclude", broken)


def leak_the_prefixes_of_an_incarnation(patch: Patch) -> None:
    patch.setattr(PrefixSender, "cancel_all", lambda self: None)


def take_an_echo_for_an_order(patch: Patch) -> None:
    begin = PrefixSender.begin

    def broken(self: Any, order: Any, now: float) -> None:
        if (order.coordinator, order.dispatch) not in self._held:
            self._past.clear()
        begin(self, order, now)

    patch.setattr(PrefixSender, "begin", broken)


def leave_blocks_to_a_prefix_when_the_role_is_over(patch: Patch) -> None:
    patch.setattr(PrefillCore, "at_rest", property(lambda self: not self.held and not self.sender.outgoing))


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (release_a_prefix_before_it_has_arrived, "network"),
    (keep_a_prefix_that_is_not_verified, "movers"),
    (leak_the_prefixes_of_an_incarnation, "fences"),
    (take_an_echo_for_an_order, "writers"),
    (leave_blocks_to_a_prefix_when_the_role_is_over, "retirements"),
]
"""Each with the scenario in which it is found quickly."""
