"""The same load of conversations on as many simulated workers: which messages a coordinator receives."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from ..planner.simulator.simulation import Simulation
from ..traces.workload.arrivals import Arrivals
from ..traces.workload.workload import Workload
from ..transport.messages.messages import Message
from .studies.simulator_speed import LENGTHS, cluster_of


def simulated(num_workers: int, rate: float, seconds: float) -> dict[str, Any]:
    """Conversations, on workers that are about as fast as 70B models need them. Messages and time are of the
    last third, when as many requests end as begin."""
    lengths = LENGTHS["conversation"]
    load = Workload(arrivals=Arrivals(rate=rate), lengths=lengths, sessions=None)
    simulation = Simulation(cluster_of("conversation", num_workers), jumps=False)
    played, received, took, num_submitted, first_at = simulation.coordinator, Counter[str](), 0.0, 0, inf
    receive_from, submit = played.receive_from, played.submit

    def counts() -> bool:
        return seconds * 2 / 3 <= simulation.queue.now - first_at < seconds

    def timed(call: Callable[..., None], *args: Any) -> None:
        nonlocal took
        begin = time.process_time()
        call(*args)
        if counts():
            took += time.process_time() - begin

    def receive(identity: bytes, messages: Sequence[Message]) -> None:
        if counts():
            received.update(type(message).__name__ for message in messages)
        timed(receive_from, identity, messages)

    def submitted(*args: Any) -> None:
        nonlocal num_submitted, first_at
        first_at = min(first_at, simulation.queue.now)
        num_submitted += counts()
        timed(submit, *args)

    played.receive_from = receive  # type: ignore[method-assign]
    played.submit = submitted  # type: ignore[method-assign, assignment]
    tallies = simulation.run(load.trace(0, max_requests=round(rate * seconds)))
    latency = tallies.percentiles()
    return {
        "workers": num_workers,
        "requests": tallies.num_requests,
        "outcomes": dict(tallies.outcomes),
        "requests_per_s": round(num_submitted * 3 / seconds),
        "received_per_s": {name: round(count * 3 / seconds, 1) for name, count in received.most_common()},
        "dispatcher_cores": round(took * 3 / seconds, 3),
        "latency_s": {name: {p: latency[name][p] for p in ("p50", "p99")} for name in ("ttft", "tpot")},
    }
