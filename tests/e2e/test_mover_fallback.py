"""A mover that breaks in mid-stream in a real worker: its requests go on by tcp, with a warning and a
count."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from e2e.cluster import HTTP, NEVER_DEAD, Cluster, running, wait_for
from e2e.test_failure import Streams
from transformers import PreTrainedModel

PROMPTS = [f"stream {i} " + "abc" * (40 * i) for i in range(4)]
NUM_TOKENS = 300
BROKEN_SHM = """
from splitserve.transport.errors import MoverError
from splitserve.transport.movers.shm import ShmSource

whole, left = ShmSource.put, [2]

def put(self, *arguments):
    if left[0] == 0:
        raise MoverError("broken by a test")
    left[0] -= 1
    whole(self, *arguments)

ShmSource.put = put
"""


def fallbacks(metrics: str) -> float:
    return sum(
        float(value)
        for value in re.findall(
            r"^splitserve_\w*mover_fallbacks\w*(?:\{[^}]*\})? (\S+)$", metrics, re.MULTILINE
        )
    )


def test_a_mover_that_breaks_is_replaced_by_zmq(
    cluster: Cluster, tiny: tuple[Path, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Streams(cluster, PROMPTS, NUM_TOKENS).texts()
    assert (
        fallbacks(HTTP.get(f"{cluster.url}/metrics").text) == 0
    )  # a process killed there is no fault of a mover
    (tmp_path / "sitecustomize.py").write_text(BROKEN_SHM)  # every Python process reads it as it starts
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with running(tiny[0], tmp_path, "--kv-cache-gib", "0.1", *NEVER_DEAD, anew=True) as broken:
        assert Streams(broken, PROMPTS, NUM_TOKENS).texts() == expected
        broken.wait_log("broken by a test; from now on by tcp")
        broken.wait_log("hands KV blocks to decode-0 by tcp")
        message = broken.log.read_text()
        assert (
            message.index("decode-0 by shm")
            < message.index("from now on by tcp")
            < message.index("decode-0 by tcp")
        )
        wait_for("the count is told", lambda: fallbacks(HTTP.get(f"{broken.url}/metrics").text) == 1)
        broken.wait_at_rest()
