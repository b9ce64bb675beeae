"""A coordinator that stands still makes no stage of the workers longer."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from e2e.cluster import HTTP, MODEL_NAME, Cluster, wait_for

STILL_S = 5.0
"""Far longer than the workers take for the request; shorter than their patience."""


def test_time_in_which_the_coordinator_stood_still_is_its_own(cluster: Cluster) -> None:
    body = {"model": MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    coordinator = cluster.state()["coordinator"]["pid"]
    with ThreadPoolExecutor(1) as pool:
        for _ in range(100):  # until one is seen while it runs
            answer = pool.submit(HTTP.post, f"{cluster.url}/v1/completions", json=body)
            wait_for("it runs, or has ended", lambda: answer.done() or any(w["dispatches"] for w in cluster.state()["workers"]))  # noqa: B023
            if not answer.done():
                break
        os.kill(coordinator, signal.SIGSTOP)
        time.sleep(STILL_S)  # the fault itself
        os.kill(coordinator, signal.SIGCONT)
        response = answer.result()
    timing = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    seconds = {name: float(milliseconds) / 1e3 for name, milliseconds in timing.items()}
    total = seconds.pop("total")
    assert abs(sum(seconds.values()) - total) < 0.01 * total
    assert seconds["coordinator"] > 0.5, seconds
    workers_s = seconds["prefill"] + seconds["handoff"] + seconds["decode"]
    assert workers_s < total - 0.9 * seconds["coordinator"], seconds
    print(seconds)
