"""A prefill and a decode worker lose each other, and the coordinator sees both: nobody is declared dead, and
every stream goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.bench.handoff import packet_network

TESTS = Path(__file__).parent.parent
WITHIN_S = 60.0  # noticed in 3 s, then tried elsewhere; the rest is for a machine with other work


@pytest.mark.skipif(
    packet_network.missing() != "", reason=f"no network between hosts: {packet_network.missing()}"
)
def test_streams_go_on_by_the_decode_worker_that_can_be_reached(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "SPLITSERVE_COORDINATOR_DEAD_AFTER_S": "20",
    }  # a worker that waits for a core is not dead
    environ |= {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "support.partition", str(tmp_path)]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen = json.loads(ran.stdout)
    assert seen["right"], "an answer differs from the one before the cut, or failed"
    assert seen["redispatches"] > 0, "nothing was under way between the two"
    assert seen["alive"] == ["decode-0", "decode-1", "prefill-0"], "the coordinator gave somebody up"
    assert seen["seconds"] < WITHIN_S
    assert seen["healed"], "prompts do not go to the decode worker again, or blocks are left over"
