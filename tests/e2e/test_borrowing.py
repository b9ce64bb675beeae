"""A burst against one prefill and one decode worker that borrow: each takes work of the other, no token
changes, no cache is lost, and afterwards each has its own role's work again."""

from __future__ import annotations

from pathlib import Path

from e2e.cluster import MODEL_NAME, NEVER_DEAD, Cluster, running
from transformers import PreTrainedModel

NUM_TOKENS = 60
PROMPTS = [f"burst {i} " + "xyz" * (40 + i) for i in range(12)]


def complete(cluster: Cluster, prompts: list[str]) -> list[str]:
    """Return the answers to one call, whose prompts arrive together."""
    answer = cluster.client.completions.create(
        model=MODEL_NAME,
        prompt=prompts,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]


def borrowed(cluster: Cluster) -> tuple[int, int]:
    counters = cluster.state()["counters"]
    return counters["borrowed_prompts"], counters["borrowed_sequences"]


def test_a_burst_is_shared_and_the_roles_stay(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    arguments = ["--borrow", "--exact", "--kv-cache-gib", "0.1", "--decode-max-num-seqs", "2"]
    arguments += ["--prefill-max-batch-tokens", "32", *NEVER_DEAD]
    with running(tiny[0], tmp_path, *arguments) as cluster:
        cluster.wait_whole(2, 2)
        before = {w["worker_id"]: w["pid"] for w in cluster.state()["workers"]}
        assert sorted(before) == [
            f"{name}-0:{role}" for name in ("decode", "prefill") for role in ("decode", "prefill")
        ]
        none = borrowed(cluster)
        in_a_burst = complete(cluster, PROMPTS)
        after = borrowed(cluster)
        assert after[0] > none[0], "the decode worker computed prompts"
        assert after[1] > none[1], "the prefill worker kept sequences"
        cluster.wait_at_rest()
        cached = {w["worker_id"]: w["blocks"]["cached"] for w in cluster.state()["workers"]}
        assert min(cached.values()) > 0
        one_by_one = [complete(cluster, [prompt])[0] for prompt in PROMPTS]
        assert one_by_one == in_a_burst
        assert borrowed(cluster) == after, "one prompt alone needs no other pool"
        cluster.wait_at_rest()
        state = cluster.state()
        assert {w["worker_id"]: w["pid"] for w in state["workers"]} == before
        assert all(w["blocks"]["cached"] >= cached[w["worker_id"]] for w in state["workers"])
        assert (state["counters"]["flips"], state["counters"]["redispatches"]) == (0, 0)
