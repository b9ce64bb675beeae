"""What one more worker is expected to do, held against simulated queues."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from splitserve.coordinator.dashboard.queueing import SATURATED, open_wait, ttft_with_one_more

NUM_JOBS = 60_000


def simulated_wait(servers: int, busy: float, seed: int) -> float:
    """Mean wait of a first-come first-served queue with Poisson arrivals and exponential service of mean
    1."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / (busy * servers), NUM_JOBS))
    free, waited = [0.0] * servers, 0.0
    for at, service in zip(arrivals, rng.exponential(1.0, NUM_JOBS), strict=True):
        begin = max(at, heapq.heappop(free))
        waited += begin - at
        heapq.heappush(free, begin + service)
    return waited / NUM_JOBS


def closed_stay(servers: int, clients: int, after_s: float, seed: int) -> tuple[float, float]:
    """Clients that ask again as soon as they are answered: mean wait, and mean whole stay. Service has mean
    1, then ``after_s`` pass."""
    rng = np.random.default_rng(seed)
    free, ready, waited, num = [0.0] * servers, [0.0] * clients, 0.0, NUM_JOBS // 3
    for service in rng.exponential(1.0, num):
        at = heapq.heappop(ready)
        begin = max(at, heapq.heappop(free))
        waited += begin - at
        heapq.heappush(free, begin + service)
        heapq.heappush(ready, begin + service + after_s)
    return waited / num, waited / num + 1 + after_s


@pytest.mark.parametrize(("servers", "busy"), [(1, 0.5), (1, 0.8), (2, 0.7), (2, 0.85), (4, 0.85), (8, 0.88)])
def test_below_saturation_the_ratio_of_waits_is_that_of_open_queues(servers: int, busy: float) -> None:
    before = simulated_wait(servers, busy, seed=1)
    after = simulated_wait(servers + 1, busy * servers / (servers + 1), seed=2)
    predicted = ttft_with_one_more(1 + before, before, 10 + before, busy * servers, busy, servers) - 1
    assert predicted == pytest.approx(after, abs=0.08 * before + 0.02)  # 8% of the wait that there was


@pytest.mark.parametrize(
    ("servers", "clients", "after_s"), [(1, 8, 0.0), (1, 8, 3.0), (2, 11, 4.0), (2, 24, 4.0), (4, 30, 1.0)]
)
def test_at_saturation_clients_that_wait_for_their_answers_gain_as_much(
    servers: int, clients: int, after_s: float
) -> None:
    queue, total = closed_stay(servers, clients, after_s, seed=3)
    fewer, _ = closed_stay(servers + 1, clients, after_s, seed=4)
    per_s = clients / total
    predicted = ttft_with_one_more(1 + queue, queue, total, per_s, per_s / servers, servers)
    assert per_s / servers >= SATURATED
    assert predicted == pytest.approx(1 + fewer, rel=0.15)


def test_one_more_never_promises_a_slower_or_an_instant_answer() -> None:
    for busy in np.linspace(0.0, 1.0, 41).tolist():
        for servers in (1, 2, 7, 64):
            ttft = ttft_with_one_more(2.0, 1.5, 6.0, 3.0 * servers, busy, servers)
            assert 0.5 <= ttft <= 2.0
    assert open_wait(0.5, 2) < open_wait(0.5, 1) < open_wait(0.8, 1)
