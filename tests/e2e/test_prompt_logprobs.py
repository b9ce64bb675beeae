"""Log probabilities of a long prompt: memory is bounded, and others are served meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from e2e.cluster import HTTP, MODEL_NAME, Cluster
from psutil import Process

NUM_TOKENS, NUM_TOP, MORE_MIB = 4090, 20, 64
"""``MORE_MIB``: what any process may grow by for two more such prompts after the first."""


def ask(cluster: Cluster, first: int) -> list[Any]:
    """Return the entries of a prompt that no cache has."""
    prompt = [first, *(5 + 7 * i % 200 for i in range(NUM_TOKENS - 1))]
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": NUM_TOP}
    answer = HTTP.post(f"{cluster.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    entries: list[Any] = answer.json()["choices"][0]["prompt_logprobs"]
    return entries


def processes(pid: int) -> list[int]:
    """Return a process and all below it."""
    return [pid, *(child.pid for child in Process(pid).children(recursive=True))]


def peaks(cluster: Cluster) -> dict[int, int]:
    """Return each process's highest resident memory so far, in MiB."""
    found = {}
    for pid in processes(cluster.process.pid):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found[pid] = next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))
    return found


def test_a_prompt_of_four_thousand_tokens(cluster: Cluster) -> None:
    entries = ask(cluster, 11)
    assert entries[0] is None
    assert len(entries) == NUM_TOKENS
    assert all(NUM_TOP <= len(entry) <= NUM_TOP + 1 for entry in entries[1:])
    before, others = peaks(cluster), 0
    with ThreadPoolExecutor(1) as aside:
        asked = aside.submit(lambda: [len(ask(cluster, first)) for first in (12, 13)])
        while not asked.done():
            assert cluster.complete("a b c", 4)
            others += not asked.done()
        assert asked.result() == [NUM_TOKENS] * 2
    assert others, "not one short request was answered meanwhile"
    after = peaks(cluster)
    assert {pid: (before[pid], after[pid]) for pid in before if after[pid] > before[pid] + MORE_MIB} == {}
    cluster.wait_at_rest()
