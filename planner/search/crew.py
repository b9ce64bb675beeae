"""The processes that sketch and simulate; each gets the question once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_context
from typing import Any, TypeVar, TypeVarTuple

from .candidates import Candidate
from .goal import Goal
from .goodput import Answer, Question

Asked = TypeVarTuple("Asked")
Result = TypeVar("Result")
_question: Question | None = None


class Crew:
    """``ask``: a module's function of the question and what is asked, for each in order."""

    def __init__(self, question: Question, num_processes: int, pool: ProcessPoolExecutor | None) -> None:
        self._question, self._pool, self.num_processes = question, pool, num_processes

    def ask(
        self, function: Callable[[Question, *Asked], Result], asked: Iterable[tuple[*Asked]]
    ) -> list[Result]:
        return [one() for one in [self.begin(function, *one) for one in asked]]

    def begin(self, function: Callable[[Question, *Asked], Result], *asked: *Asked) -> Callable[[], Result]:
        """Start one call of ``ask`` beside others, and return a call that waits for its result."""
        if self._pool is None:
            return partial(function, self._question, *asked)
        return self._pool.submit(_call, function, asked).result


@contextmanager
def crew(question: Question, num_processes: int) -> Iterator[Crew]:
    if num_processes == 1:
        yield Crew(question, 1, None)
        return
    with ProcessPoolExecutor(num_processes, get_context("spawn"), _remember, (question,)) as pool:
        try:
            yield Crew(question, num_processes, pool)
        except BaseException:
            for process in active_children():  # else the pool waits for their simulations
                process.terminate()
            raise


def _remember(question: Question) -> None:
    global _question
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that prints the answer
    _question = question


def _call(function: Callable[..., Result], asked: tuple[Any, ...]) -> Result:
    assert _question is not None, "the process was told"
    return function(_question, *asked)


SHOWN = 5
"""Clusters in the answer."""


class Stopped(Exception):
    """The search was interrupted; the message has its results so far."""


def so_far(
    question: Question, goal: Goal, answers: Iterable[Answer], sketched: Iterable[tuple[float, Candidate]]
) -> Stopped:
    """The best clusters known: those simulated or, before any was, those sketched."""
    simulated = [(a.goodput, a.candidate) for a in answers if a.goodput > 0]
    known = simulated or [*sketched]
    best = sorted(known, key=lambda pair: goal.value(question, pair[1], pair[0]), reverse=True)[:SHOWN]
    words = [f"{question.hardware.words(c)} {goodput:.2f} requests/s" for goodput, c in best]
    how = "simulated" if simulated else "only sketched"
    found = f"Best so far ({how}): {'; '.join(words)}." if words else "Nothing is known yet."
    return Stopped(f"Stopped. {found}")
