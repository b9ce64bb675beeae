"""Many worlds: how they are run, what is counted, how a failure is reported."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from simulation.faults import Scenario
from simulation.network import LATE_S
from simulation.scenario import NAMED, draw_scenario
from simulation.world import World

from splitserve.transport.process.heap import collapse_heap

REQUESTS = 500
"""Requests a world."""
STARTS_WITHIN_S = 5.0
"""Requests come when each coordinator has workers of both roles, or after this many seconds: a lost Hello
is repeated after a second."""
FAULTS_GO_ON_S = 6.0
"""After the last arrival, until most have been served among faults; at most this many (virtual) seconds."""
COLLAPSE_EVERY = 4
"""Worlds between two looks at what has come to the heap."""
REST_S = 60.0
"""Once the faults have stopped, everything must have ended and come to rest within this many
(virtual) seconds, in a world of ``REQUESTS``; see ``rest_s``."""


def simulate(seed: int, scenario: Scenario, requests: int = REQUESTS) -> World:
    """Requests arrive among faults; then the faults stop, and everything must come to rest. Stops at the
    first violation."""
    world = World(seed, scenario)
    before = logging.root.manager.disable
    logging.disable()  # the shells log every fault
    try:
        _live(world, requests)
    except Exception as error:  # an invariant inside a core spoke first
        world.violated(repr(error))
        world.traceback = traceback.format_exc()
    finally:
        logging.disable(before)
    return world


def _live(world: World, requests: int) -> None:
    world.queue.run(0.5)
    world.queue.run_until(
        lambda: not any(each.core.pools.gap for each in world.coordinators.values()), STARTS_WITHIN_S
    )
    number = 0
    while number < requests and not world.violations:
        number += world.clients.arrive(number)
        world.queue.run(world.queue.now + world.random.expovariate(world.scenario.rate))
    if not world.violations:
        pending = world.clients.pending
        world.queue.run_until(
            lambda: len(pending) <= requests // 20 or bool(world.violations), FAULTS_GO_ON_S
        )
        world.queue.run(world.queue.now + world.random.random())
        _come_to_rest(world, rest_s(requests))


def rest_s(requests: int) -> float:
    """``REST_S`` for a world of ``requests``. Half of it is for work: a small world has less. The other half
    is for time limits, which every world has."""
    return REST_S * (1 + min(1.0, requests / REQUESTS)) / 2


def _come_to_rest(world: World, at_most_s: float) -> None:
    world.calm = True
    world.network.heal()
    calm_since = world.queue.now
    world.queue.run(max(calm_since + LATE_S, world.network.held_until) + 0.01)  # what was late has come
    world.queue.run_until(lambda: world.checks.at_rest() or bool(world.violations), at_most_s)
    world.rest_s = world.queue.now - calm_since
    world.queue.run(world.queue.now + 0.4)  # everything has been reported
    world.checks.at_end()


@dataclass
class Report:
    """What a campaign has done."""

    num_requests: int = 0
    num_worlds: int = 0
    num_events: int = 0
    processor_s: float = 0.0
    longest_rest_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, world: World, replay: str) -> None:
        self.num_worlds += 1
        self.num_requests += len(world.clients.all)
        self.num_events += world.queue.num_events
        self.longest_rest_s = max(self.longest_rest_s, world.rest_s)
        self.counts.update(world.counts)
        self.messages.update(world.network.sent)
        if world.violations:
            self.failures.append(f"{world.violations[0]}   replay: {replay}")

    def merge(self, other: Report) -> None:
        self.num_worlds += other.num_worlds
        self.num_requests += other.num_requests
        self.num_events += other.num_events
        self.processor_s += other.processor_s
        self.longest_rest_s = max(self.longest_rest_s, other.longest_rest_s)
        self.counts.update(other.counts)
        self.messages.update(other.messages)
        self.failures += other.failures

    def summary(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            "requests": self.num_requests,
            "worlds": self.num_worlds,
            "events": self.num_events,
            "processor_s": round(self.processor_s, 1),
            "requests_per_processor_s": round(self.num_requests / self.processor_s, 1)
            if self.processor_s
            else 0.0,
            "longest_rest_s": round(self.longest_rest_s, 2),
            "counts": dict(sorted(self.counts.items())),
            "messages": dict(sorted(self.messages.items())),
            "failures": self.failures,
        }


def run(
    first_seed: int,
    num_requests: int,
    name: str = "drawn",
    stop_at_failures: int = 1,
    a_world: int = REQUESTS,
) -> Report:
    """Worlds of seeds ``first_seed`` and following, of ``a_world`` requests each, until ``num_requests``
    have been simulated."""
    report, size = Report(), "" if a_world == REQUESTS else f" --a-world {a_world}"
    began, seed = time.process_time(), first_seed
    with rare_garbage_collection():
        while report.num_requests < num_requests and len(report.failures) < stop_at_failures:
            if report.num_worlds % COLLAPSE_EVERY == 0:
                collapse_heap()
            report.add(
                simulate_named(name, seed, a_world),
                f"cd tests && python -m simulation --scenario {name} --seed {seed}{size}",
            )
            seed += 1
    report.processor_s = time.process_time() - began
    return report


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """A world makes many small objects, and hardly any cycle before it ends: looking for cycles as often as
    usual costs a tenth."""
    before = gc.get_threshold()
    gc.set_threshold(400_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def simulate_named(name: str, seed: int, requests: int = REQUESTS) -> World:
    """``name``: one of ``NAMED``, or ``drawn``: the seed draws its own scenario."""
    return simulate(seed, draw_scenario(seed) if name == "drawn" else NAMED[name], requests)
