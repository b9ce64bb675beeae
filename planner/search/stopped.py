"""The answer of a search that was interrupted."""

from __future__ import annotations

from collections.abc import Iterable

from .candidates import Candidate
from .goal import Goal
from .goodput import Answer, Question

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
