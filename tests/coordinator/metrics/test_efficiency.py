"""What the output costs, by the GPUs that are paid."""

from __future__ import annotations

import pytest

from splitserve.coordinator.metrics.efficiency import Efficiency
from splitserve.coordinator.metrics.system_snapshot import SystemSnapshot, WorkerSnapshot


def worker(name: str, role: str, device: str = "", **counters: float) -> WorkerSnapshot:
    return WorkerSnapshot(name, role, 100, 50, 20, 30, 0, 2, 1, 17, 5, counters, device=device)


def test_efficiency_counts_a_shared_gpu_once() -> None:
    efficiency = Efficiency(price_per_hour=3.6)
    for second in range(0, 101, 10):
        grown = {"output_tokens": 10.0 * second, "gpu_energy_joules": 700.0 * second}
        shared = [worker("p", "prefill", "GPU-1", **grown), worker("d", "decode", "GPU-1", **grown)]
        efficiency.sample(float(second), SystemSnapshot(workers=shared))
    gauges = efficiency.gauges()
    assert gauges["tokens_per_gpu_hour"] == pytest.approx(20 * 3600)
    assert gauges["joules_per_token"] == pytest.approx(35.0)
    assert gauges["cost_per_million_tokens"] == pytest.approx(3.6 / 3600 / 20 * 1e6)
    assert (efficiency.gpu_s, efficiency.cost) == (pytest.approx(100), pytest.approx(0.1))


def test_each_gpu_of_a_worker_is_paid() -> None:
    efficiency = Efficiency(price_per_hour=1.0)
    for now in (0.0, 3600.0):
        workers = [worker("p", "prefill", "GPU-1*4"), worker("d", "decode", "GPU-1*4")]
        workers += [worker("e", "decode", "GPU-5*2"), worker("f", "decode", "GPU-7")]
        efficiency.sample(now, SystemSnapshot(workers=workers))
    assert (efficiency.cost, efficiency.gpu_s) == (7.0, 7 * 3600.0), "the first two share theirs"


def test_workers_without_a_gpu_cost_too() -> None:
    efficiency = Efficiency(price_per_hour=1.0)
    for now in (0.0, 3600.0):
        efficiency.sample(now, SystemSnapshot(workers=[worker("p", "prefill"), worker("d", "decode")]))
    assert (efficiency.cost, efficiency.gpu_s) == (2.0, 0.0)
    assert "tokens_per_gpu_hour" not in efficiency.gauges()
