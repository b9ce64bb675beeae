"""Bugs for test_teeth.py, put into the worker's loop: the ends of its roles, incarnations, steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from splitserve.decode.core import DecodeCore
from splitserve.prefill.core import PrefillCore
from splitserve.transport.messages.messages import Goodbye
from splitserve.worker.loop import Worker
from splitserve.worker.played_role import PlayedRole
from splitserve.worker.roles import Departure
from splitserve.worker.steps import RunningStep

Patch = pytest.MonkeyPatch


# --- the end of a role -----------------------------------------------------------------------------


def forget_the_sending_end_of_a_role_that_has_ended(patch: Patch) -> None:
    end = Worker.end

    def broken(self: Any, name: Any) -> None:
        end(self, name)
        self._retiring.clear()

    patch.setattr(Worker, "end", broken)


def end_one_role_of_a_mixed_worker(patch: Patch) -> None:
    patch.setattr(Worker, "_end_together", lambda self, now: None)


def end_a_role_that_still_holds_requests(patch: Patch) -> None:
    patch.setattr(Departure, "is_due", lambda self, now: self.has_begun)


def send_the_last_reports_after_goodbye(patch: Patch) -> None:
    carry_out = PlayedRole.carry_out

    def broken(self: Any, now: float) -> None:
        if self.departure.is_due(now):
            worker_id, incarnation = self._settings.worker_id, self.links.incarnation
            self.links.send(Goodbye(worker_id=worker_id, incarnation=incarnation))
        carry_out(self, now)

    patch.setattr(PlayedRole, "carry_out", broken)


# --- incarnations and coordinators ------------------------------------------------------------------


def report_as_the_incarnation_that_was_fenced(patch: Patch) -> None:
    patch.setattr(DecodeCore, "rename", lambda self, meet: None)


def meet_peers_as_the_incarnation_that_was_fenced(patch: Patch) -> None:
    patch.setattr(PrefillCore, "rename", lambda self, meet: None)


def keep_the_channels_of_the_incarnation_that_was_fenced(patch: Patch) -> None:
    def broken(self: Any, incarnation: int) -> None:
        self.core.drop_others(-1)
        self.carry_out(self._clock.now())
        self.core.rename(self._meet())

    patch.setattr(PlayedRole, "fenced", broken)


def send_a_new_coordinator_no_cache(patch: Patch) -> None:
    patch.setattr(PlayedRole, "welcomed", lambda self, _: self.core.drop_others(*self.links.coordinators))


# --- steps -----------------------------------------------------------------------------------------


def forget_the_sequences_of_a_step_that_was_not_run(patch: Patch) -> None:
    def broken(self: Any) -> None:
        if self.prompts is not None:
            self.prompts.core.scheduler.skip(self.prompts.step)

    patch.setattr(RunningStep, "skip", broken)


def send_a_layer_that_is_being_computed(patch: Patch) -> None:
    num_layers = RunningStep.num_layers_to_send

    def broken(self: Any) -> int:
        return min(num_layers(self) + 1, 3) if num_layers(self) else 0

    patch.setattr(RunningStep, "num_layers_to_send", broken)


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (forget_the_sending_end_of_a_role_that_has_ended, "retirements"),
    (end_one_role_of_a_mixed_worker, "mixed"),
    (end_a_role_that_still_holds_requests, "flips"),
    (send_the_last_reports_after_goodbye, "drains"),
    (report_as_the_incarnation_that_was_fenced, "fences"),
    (meet_peers_as_the_incarnation_that_was_fenced, "fences"),
    (keep_the_channels_of_the_incarnation_that_was_fenced, "fences"),
    (send_a_new_coordinator_no_cache, "coordinators"),
    (forget_the_sequences_of_a_step_that_was_not_run, "window"),
    (send_a_layer_that_is_being_computed, "calm"),
]
"""Each with the scenario in which it is found quickly."""
