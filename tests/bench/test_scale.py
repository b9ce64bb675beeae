"""The bench of large clusters, on a small one."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from splitserve.bench.http.streaming_servers import model_folder
from splitserve.bench.scale import STREAMS_PER_WORKER, measured, needed
from splitserve.bench.scale_simulated import simulated


def test_what_a_coordinator_is_given_is_counted(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    options = Namespace(seconds=0.5, rate=20, heartbeat_s=0.25)
    found = measured(model_folder(tmp_path), tmp_path, cores, 4, options)
    assert found["prompt_blocks"] > 50
    assert found["streams"] == 2 * STREAMS_PER_WORKER
    assert found["blocks_reported"] == 4 * 4096
    sums = needed({**found, "cpu_us_per_token": 0.6, "cpu_us_per_request_cached_on_all": 600})
    assert (sums["tokens_cores"], sums["requests_cores"]) == (0.211, 1.0)


def test_the_simulated_coordinator_is_given_the_same_kinds_of_messages() -> None:
    seen = simulated(num_workers=10, rate=20, seconds=6)
    assert seen["outcomes"] == {"finished": 120}
    assert {"Load", "BlockEvents", "FirstToken", "Joined", "StepTokens"} <= seen["received_per_s"].keys()
    assert 10 < seen["requests_per_s"] < 30
