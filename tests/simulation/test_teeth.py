"""The simulator has teeth: each of these bugs, put in on purpose, is found, most within a few hundred requests.

Bugs that a second line of the protocol makes good are not here, for nothing wrong comes of them: a lost Nack (the Handoff is said again),
a skipped Fenced (a worker that is not answered says Hello again), a moved sequence that is dropped too early (notes are compared).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulation import bugs_of_the_handoff, bugs_of_the_processes
from simulation.campaign import run

BUDGET = 6_000
"""Requests within which each must be found; the everyday run makes 20,000."""
A_WORLD = 50
"""Requests: what a bug leaves behind shows at a world's end, if nothing that comes later mends it."""
OF_THE_PATCH = ("AttributeError", "NameError", "TypeError")
"""What a bug raises that no longer fits the code it was made for."""
BUGS = [*bugs_of_the_handoff.BUGS, *bugs_of_the_processes.BUGS]


@pytest.mark.parametrize(("bug", "scenario"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_a_deliberate_bug_is_found(bug: Callable[[pytest.MonkeyPatch], None], scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    report = run(1, BUDGET, scenario, a_world=A_WORLD)
    assert report.failures, f"not found within {report.num_requests} requests"
    assert not any(error in report.failures[0] for error in OF_THE_PATCH), f"it no longer fits the code: {report.failures[0]}"
    print(f"found within {report.num_requests} requests: {report.failures[0]}")
