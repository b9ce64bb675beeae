"""A coordinator that stands still makes no stage of the workers longer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import orjson
from e2e import paced
from e2e.cluster import HTTP, MODEL_NAME, NEVER_DEAD, running

NUM_TOKENS, DECODE_STEP_S = 150, 0.01
STILL_S, ORPHANED_AFTER_S = 8.0, 60.0
"""Longer than the workers need for all tokens, also on a busy machine; and their patience with a silent
coordinator."""


def test_time_in_which_the_coordinator_stood_still_is_its_own(tmp_path: Path) -> None:
    runner = paced.paced_runner(tmp_path / "profile.json", 0.01, DECODE_STEP_S)
    body = {
        "model": MODEL_NAME,
        "prompt": [5, 6, 7],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    patience = ("--orphaned-after-s", str(ORPHANED_AFTER_S))
    with running(paced.MODEL, tmp_path, "--runner", runner, *patience, *NEVER_DEAD) as cluster:
        coordinator = cluster.state()["coordinator"]["pid"]
        began = time.monotonic()
        with HTTP.stream("POST", f"{cluster.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(coordinator, signal.SIGSTOP)
            time.sleep(STILL_S)  # the fault itself
            os.kill(coordinator, signal.SIGCONT)
            (usage,) = (chunk["usage"] for line in lines if (chunk := chunk_of(line)) and chunk["usage"])
    took = time.monotonic() - began
    seconds = {name.removesuffix("_s"): s for name, s in usage["splitserve"].items() if name.endswith("_s")}
    assert STILL_S < sum(seconds.values()) < took
    assert seconds["coordinator"] > 0.2 * STILL_S, seconds
    assert seconds["queue"] + seconds["prefill"] + seconds["handoff"] + seconds["decode"] < STILL_S, seconds


def chunk_of(line: str) -> dict[str, Any]:
    """The chunk of a stream's line; empty if it has none."""
    found: dict[str, Any] = orjson.loads(line[6:]) if line.startswith("data: {") else {}
    return found
