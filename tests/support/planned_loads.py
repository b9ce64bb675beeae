"""Loads, hardware and bounds to plan for."""

from __future__ import annotations

from functools import cache

from support.simulated import profile

from splitserve.planner.search.candidates import Hardware, Kind
from splitserve.planner.search.goal import Goal, Limits
from splitserve.planner.search.goodput import Load, Question
from splitserve.planner.search.plan import Plan
from splitserve.planner.search.search import search
from splitserve.planner.simulator.slo import ServiceLevel, Slo
from splitserve.traces.request import TraceRequest

HARDWARE = Hardware((Kind.of(profile()),))
LEVEL = ServiceLevel(Slo(0.4, 0.03), 0.9)


def question(prompt: int, output: int, count: int = 40) -> Question:
    requests = tuple(
        TraceRequest(0.125 * i + 0.03125 * (i % 3), prompt + i % 7, output + i % 5) for i in range(count)
    )
    return Question.of(HARDWARE, Load(requests, None), LEVEL)


@cache
def planned(count: int) -> Plan:
    """The plan of long prompts with short answers on three GPUs. A test that changes it copies it."""
    return search(question(400, 3, count), Goal("goodput", Limits(3), chunks=(512,)), processes=1)
