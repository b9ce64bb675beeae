"""Once a cluster is ready, the first request of each kind costs the workers no more than later ones.

In processor time of the worker processes, which a busy machine does not stretch as it does a clock's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import HTTP, MODEL_NAME, NEVER_DEAD, Cluster, running, wait_for

from splitserve.cli.settings import DEMO_MODEL
from splitserve.kernels.huge_pages import POPULATING

REQUESTS = 8
TIMES, AND_S = (
    2.0,
    0.01,
)  # caches of a busy processor; reading a tokenizer or compiling takes several times as much
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {
        "temperature": 0.8,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {"5": 2},
    },
    "logprobs": {"temperature": 0, "logprobs": 3},
    "structured": {"temperature": 0, "structured_outputs": {"regex": "[a-z]{40}"}},
    "long": {"temperature": 0},
}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The bundled model, whose tokenizer is a real one. The pages of its cache that are found beside requests
    have been: the thread that finds them costs the same process, at any time, and on a virtual machine one
    page may cost as much as a request."""
    with running(
        DEMO_MODEL, tmp_path_factory.mktemp("fresh"), "--kv-cache-gib", "0.2", *NEVER_DEAD
    ) as cluster:
        for pid in pids_of(cluster):
            wait_for("the cache's pages are found", lambda pid=pid: not populates(pid))
        yield cluster


def pids_of(cluster: Cluster) -> list[int]:
    return [worker["pid"] for role in ("prefill", "decode") for worker in cluster.workers(role)]


def populates(pid: int) -> bool:
    """Whether this process still finds pages of its cache."""
    return any(name_of_thread(task) == POPULATING for task in Path(f"/proc/{pid}/task").iterdir())


def name_of_thread(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return ""


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process, also ended ones."""
    return time.clock_gettime((~pid << 3) | 2)  # Linux: the clock that clock_getcpuclockid names


def cost(cluster: Cluster, pids: list[int], body: dict[str, Any]) -> float:
    """Processor seconds of the workers for one request."""
    before = sum(map(cpu_seconds, pids))
    answer = HTTP.post(f"{cluster.url}/v1/completions", json={"model": MODEL_NAME, "max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    return sum(map(cpu_seconds, pids)) - before


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_request_is_as_cheap_as_the_tenth(fresh: Cluster, kind: str) -> None:
    pids = pids_of(fresh)
    words = 300 if kind == "long" else 5
    bodies = [{"prompt": f"{kind} {number} " * words, **KINDS[kind]} for number in range(REQUESTS)]
    first, *later = (cost(fresh, pids, body) for body in bodies)
    assert first <= TIMES * statistics.median(later) + AND_S, (first, later)
