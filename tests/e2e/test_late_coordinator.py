"""A coordinator that stands still makes no stage of the workers longer."""

from __future__ import annotations

import os
import re
import signal
import time
from itertools import islice
from pathlib import Path

import pytest
from e2e import paced
from e2e.cluster import HTTP, MODEL_NAME, NEVER_DEAD, running

NUM_TOKENS, DECODE_STEP_S = 200, 0.01
STILL_S = 5.0
"""Longer than the workers need for all tokens, also on a busy machine; shorter than their patience with a
silent coordinator."""


def test_time_in_which_the_coordinator_stood_still_is_its_own(tmp_path: Path) -> None:
    runner = paced.paced_runner(tmp_path / "profile.json", 0.01, DECODE_STEP_S)
    body = {
        "model": MODEL_NAME,
        "prompt": [5, 6, 7],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with running(paced.MODEL, tmp_path, "--runner", runner, *NEVER_DEAD) as cluster:
        coordinator = cluster.state()["coordinator"]["pid"]
        with HTTP.stream("POST", f"{cluster.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert len(list(islice(lines, 20))) == 20
            os.kill(coordinator, signal.SIGSTOP)
            time.sleep(STILL_S)  # the fault itself
            os.kill(coordinator, signal.SIGCONT)
            (timing,) = (line for line in lines if line.startswith(": server-timing "))
    seconds = {
        name: float(milliseconds) / 1e3 for name, milliseconds in re.findall(r"(\w+);dur=([\d.]+)", timing)
    }
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total, rel=0.01)
    assert seconds["coordinator"] > 0.2 * STILL_S, seconds
    assert seconds["queue"] + seconds["prefill"] + seconds["handoff"] + seconds["decode"] < STILL_S, seconds
