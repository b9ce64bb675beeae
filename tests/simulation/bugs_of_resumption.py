"""Bugs for test_teeth.py, put into what has answers resumed by another coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from splitserve.coordinator.lifecycle.state_machine import RequestStateMachine
from splitserve.decode import core
from splitserve.decode.answers import Answers
from splitserve.decode.rows import DecodeRows
from splitserve.decode.scheduler import DecodeScheduler

Patch = pytest.MonkeyPatch


def never_forget_a_complete_answer(patch: Patch) -> None:
    patch.setattr(Answers, "tick", lambda self, now: [])


def resume_whichever_answer_there_is(patch: Patch) -> None:
    def broken(self: Any, answer_id: bytes) -> Any:
        return next((s for s in self._scheduler.running.values() if s.answer_id), None)

    patch.setattr(Answers, "running", broken)


def number_rows_of_a_resumed_sequence_as_before(patch: Patch) -> None:
    patch.setattr(DecodeRows, "rename", lambda self, sequence: None)


def leave_the_steps_in_flight_to_the_coordinator_before(patch: Patch) -> None:
    rename = DecodeScheduler.rename

    def broken(self: Any, sequence: Any, *args: Any) -> None:
        steps, self._in_flight = self._in_flight, []
        rename(self, sequence, *args)
        self._in_flight = steps

    patch.setattr(DecodeScheduler, "rename", broken)


def begin_a_resumed_answer_with_its_second_token(patch: Patch) -> None:
    def broken(order: Any, tokens: list[int], reason: Any) -> Any:
        return [replace(m, tokens=m.tokens[4:] + m.tokens[:4]) for m in resumed(order, tokens, reason)]

    resumed = core.resumed
    patch.setattr(core, "resumed", broken)


def forget_that_an_answer_was_asked_for(patch: Patch) -> None:
    resume = RequestStateMachine.resume

    def broken(self: Any, request: Any, *args: Any) -> Any:
        action = resume(self, request, *args)
        del self.assignments.by_dispatch[request.dispatch]
        return action

    patch.setattr(RequestStateMachine, "resume", broken)


def leave_the_grammar_to_the_dispatch_before(patch: Patch) -> None:
    resume = core.DecodeCore._resume

    def broken(self: Any, *order: Any) -> None:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(core.DecodeCore, "_compile_grammar", lambda *_: None)
            resume(self, *order)

    patch.setattr(core.DecodeCore, "_resume", broken)


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (never_forget_a_complete_answer, "keys"),
    (resume_whichever_answer_there_is, "keys"),
    (number_rows_of_a_resumed_sequence_as_before, "keys"),
    (leave_the_steps_in_flight_to_the_coordinator_before, "keys"),
    (begin_a_resumed_answer_with_its_second_token, "keys"),
    (forget_that_an_answer_was_asked_for, "keys"),
    (leave_the_grammar_to_the_dispatch_before, "odd"),
]
"""Each with the scenario in which it is found quickly."""
