"""Real processes, the openai client, real tokens."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from e2e.cluster import HTTP, MODEL_NAME, NEVER_DEAD, Cluster, running, wait_for
from support.tiny import Tiny

from splitserve.transport.movers import nixl
from splitserve.transport.movers.opening import IN_THE_CLEAR

NUM_BYTES = 256
"""Tokens from here on are special: they are no part of a completion's text."""


def reference(cluster: Cluster, tiny: Tiny, prompt: list[int], max_tokens: int) -> str:
    """Return the greedy answer of transformers, as text."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = tiny[1].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    tokens = [t for t in out[0, len(prompt) :].tolist() if t < NUM_BYTES]
    text: str = HTTP.post(f"{cluster.url}/detokenize", json={"model": MODEL_NAME, "tokens": tokens}).json()[
        "prompt"
    ]
    return text


def test_tokens_are_those_of_transformers(cluster: Cluster, tiny: Tiny) -> None:
    prompt = [10 + (i * 7) % 200 for i in range(50)]
    expected = reference(cluster, tiny, prompt, 40)
    assert cluster.complete(prompt, 40, extra_body={"min_tokens": 40}) == expected
    assert "".join(cluster.stream(prompt, 40, extra_body={"min_tokens": 40})) == expected
    cluster.wait_log("by shm")  # the mover of one host


def test_a_long_prompt_over_many_chunks(cluster: Cluster, tiny: Tiny) -> None:
    prompt = [(i * i) % 250 for i in range(1700)]  # four chunks of 512
    expected = reference(cluster, tiny, prompt, 16)
    assert cluster.complete(prompt, 16, extra_body={"min_tokens": 16}) == expected


def test_a_shared_prefix_is_computed_once(cluster: Cluster) -> None:
    prefix = [(i * 31) % 240 for i in range(400)]

    def cached_tokens(tail: int) -> int:
        answer = cluster.client.completions.create(
            model=MODEL_NAME, prompt=[*prefix, tail, tail], max_tokens=4, temperature=0
        )
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    assert cached_tokens(1) == 0
    cluster.wait_reported()
    assert cached_tokens(2) == 400  # 25 whole blocks


def test_64_streams_at_once(cluster: Cluster) -> None:
    prompts = [f"number {i}: " + "x" * (i % 40) for i in range(64)]
    with ThreadPoolExecutor(64) as pool:
        streamed = list(pool.map(lambda p: "".join(cluster.stream(p, 48)), prompts))
    alone = [cluster.complete(prompts[i], 48) for i in (0, 17, 63)]
    assert [streamed[i] for i in (0, 17, 63)] == alone
    cluster.wait_at_rest()


def test_a_seed_repeats_and_choices_differ(cluster: Cluster) -> None:
    def sample() -> list[str]:
        answer = cluster.client.completions.create(
            model=MODEL_NAME, prompt="abc", max_tokens=24, temperature=1.0, seed=5, n=3
        )
        return [choice.text for choice in answer.choices]

    first = sample()
    assert sample() == first
    assert len(set(first)) == 3


def test_a_client_that_leaves_frees_everything(cluster: Cluster) -> None:
    length = 3000

    def num_steps() -> int:
        return sum(int(worker["steps"]) for worker in cluster.workers("decode"))

    def was_cut_short() -> bool:
        before = num_steps()
        stream = cluster.stream("leaving early", length)
        next(stream)
        stream.close()
        cluster.wait_at_rest()
        return num_steps() - before < length - 1

    assert any(was_cut_short() for _ in range(5)), "each answer was made to its end, though nobody heard it"
    assert len(cluster.complete("still here", 8)) > 0


def test_metrics_tell_of_the_work(cluster: Cluster) -> None:
    cluster.complete("metrics", 4)
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_handoff_time_seconds",
        "kv_blocks",
    ):
        # a scrape within a second of another gets the same text
        wait_for(name, lambda name=name: f"splitserve_{name}" in HTTP.get(f"{cluster.url}/metrics").text)


def test_metrics_tell_how_busy_each_worker_is_and_how_long_its_start_took(cluster: Cluster) -> None:
    cluster.complete("busy", 64)

    def values(name: str) -> dict[str, float]:
        text = HTTP.get(f"{cluster.url}/metrics").text
        return {
            labels: float(value)
            for labels, value in re.findall(rf"^splitserve_worker_{name}{{([^}}]*)}} (\S+)$", text, re.M)
        }

    for role in ("prefill", "decode"):

        def ran(role: str = role) -> bool:
            busy = values("busy_seconds_total").items()
            return sum(seconds for labels, seconds in busy if role in labels) > 0

        wait_for(f"a {role} worker's steps are counted", ran)
        assert any(role in labels and size >= 1 for labels, size in values("largest_batch").items())
    assert all(0 <= share <= 1 for share in values("busy_ratio").values())
    phases = {
        match[1] for labels in values("start_seconds") if (match := re.search('phase="([a-z_]+)"', labels))
    }
    assert {"fingerprint", "weights", "kv_cache", "warm_up", "connect"} <= phases


@pytest.mark.parametrize("mover", ["tcp", "nixl", "nccl"])
def test_every_other_mover(tiny: Tiny, tmp_path: Path, mover: str) -> None:
    if mover == "nixl" and not nixl.is_installed():
        pytest.skip("NIXL is not installed: pip install 'splitserve[nixl]'")
    prompt = [5 + (i * 3) % 100 for i in range(700)]
    plain = ["--plaintext-kv"] if mover in IN_THE_CLEAR else []
    with running(
        tiny[0], tmp_path, "--mover", mover, "--kv-cache-gib", "0.1", *plain, *NEVER_DEAD
    ) as cluster:
        expected = reference(cluster, tiny, prompt, 12)
        assert cluster.complete(prompt, 12, extra_body={"min_tokens": 12}) == expected
        cluster.wait_log(f"by {mover}")
        cluster.wait_at_rest()
