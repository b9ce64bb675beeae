"""Splitwise's comparisons: the nine levels are the paper's, and a search of divisions finds the least
one."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from splitserve.bench.studies.splitwise_designs import Machines, Task, rates_of, run
from splitserve.bench.studies.splitwise_machine import Job
from splitserve.bench.studies.splitwise_slo import NineSlos

MACHINES = Machines(price_a100=1.0, price_h100=2.0, power_a100=10.0, power_h100=17.5, capped=0.7)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompts of 512 tokens take 0.1 s on an A100 and half of that on an H100; a token takes 20 and 14 ms."""
    with (tmp_path / "perf_model.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "model",
                "hardware",
                "prompt_size",
                "batch_size",
                "token_size",
                "prompt_time",
                "token_time",
                "tensor_parallel",
            ]
        )
        for hardware, speed in (("a100-80gb", 1.0), ("h100-80gb", 0.5), ("h100-80gb-pcap", 0.6)):
            for tokens in (128, 512, 2048):
                writer.writerow(
                    [
                        "llama2-70b",
                        hardware,
                        tokens,
                        1,
                        128,
                        tokens / 5.12 * speed,
                        20 * (0.4 + 0.6 * speed),
                        8,
                    ]
                )
    (tmp_path / "traces").mkdir()
    for rate in (10, 20, 30):
        with (tmp_path / "traces" / f"rr_code_{rate}_2min.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                [
                    "request_id",
                    "request_type",
                    "application_id",
                    "arrival_timestamp",
                    "batch_size",
                    "prompt_size",
                    "token_size",
                ]
            )
            writer.writerows([i, 2, 0, 1 + i / rate, 1, 512, 8] for i in range(10 * rate))
        (tmp_path / "traces" / f"rr_code_{rate}_2min.csv").rename(
            tmp_path / "traces" / f"rr_code_{rate}_2min.csv.gz"
        )
    return tmp_path


def test_nine_levels_against_an_uncontended_a100(data: Path) -> None:
    slos = NineSlos(data / "perf_model.csv", "llama2-70b")
    alone = [Job(i, 0.0, 512, 11, ttft=0.1, e2e=0.1 + 10 * 0.02) for i in range(100)]
    assert slos.slowdowns(alone)["ttft"] == pytest.approx((1, 1, 1))
    assert slos.slowdowns(alone)["tbt"] == pytest.approx((10 / 11,) * 3)  # over all tokens, the first one too
    assert slos.missed(alone, 100) == []
    assert slos.missed(alone, 101) == ["1 never done"]
    for job in alone[:20]:
        job.ttft, job.e2e = 0.31, 0.31 + 10 * 0.02
    assert slos.missed(alone, 100) == ["ttft_p90", "e2e_p90"]


def test_prices_and_powers_are_inputs() -> None:
    assert MACHINES.of("Splitwise-HA", 3, 2) == pytest.approx((8.0, 72.5))
    assert MACHINES.of("Splitwise-HHcap", 3, 2) == pytest.approx((10.0, 77.0))
    assert MACHINES.of("Baseline-A100", 7, 0) == pytest.approx((7.0, 70.0))


def test_the_least_machines_for_a_rate_and_the_highest_rate_for_a_budget(data: Path) -> None:
    assert rates_of(data, "code") == [10, 20, 30]
    (least, *_) = run(Task(data, "llama2-70b", "code", "iso-throughput", "Splitwise-HH", MACHINES, 20))
    assert least.num_prompt + least.num_token >= 2
    assert (least.rate, least.price) == (20, 2 * (least.num_prompt + least.num_token))
    (row,) = run(Task(data, "llama2-70b", "code", "iso-cost", "Splitwise-HH", MACHINES, least.price))
    assert row.rate >= 20
    assert row.price <= least.price
    (poorer,) = run(Task(data, "llama2-70b", "code", "iso-cost", "Splitwise-HH", MACHINES, least.price - 2))
    assert poorer.rate < 20
    assert poorer.missed_at_next
