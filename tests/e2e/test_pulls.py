"""A conversation's next turn: the prefill worker gets the answer's KV blocks from the decode worker, with the
same bits as if it had computed them; it computes them where that worker stands still."""

from __future__ import annotations

import os
import signal

from e2e.cluster import MODEL_NAME, Cluster
from e2e.forked_cluster import ForkedCluster

PROMPT = list(range(40, 240))
NUM_TOKENS = 200
BLOCK = 16


def ask(cluster: Cluster, prompt: list[int], salt: str = "") -> tuple[list[int], int]:
    """Return the answer's tokens, and how many of the prompt were cached."""
    more = {"ignore_eos": True, "return_token_ids": True, **({"cache_salt": salt} if salt else {})}
    answer = cluster.client.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, extra_body=more
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    tokens = answer.choices[0].model_dump()["token_ids"]
    return tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


def counted(cluster: Cluster) -> tuple[int, int]:
    """Pulls, and tokens whose blocks the prefill workers have pulled."""
    pulled = sum(w["counters"].get("pulled_tokens", 0) for w in cluster.workers("prefill"))
    return cluster.state()["counters"]["prefix_pulls"], pulled


def test_an_answer_is_not_computed_again(forked_cluster: ForkedCluster) -> None:
    cluster = forked_cluster
    cluster.wait_whole(2, 2)
    pulls, tokens = counted(cluster)
    prompt = PROMPT
    for turn in range(1, 4):
        answer, _ = ask(cluster, prompt)
        cluster.wait_reported()
        known = len(prompt) + NUM_TOKENS - 1  # the last token's keys and values are nowhere
        prompt = [*prompt, *answer, *range(turn, turn + 20)]
        expected, cached = ask(cluster, prompt, salt=f"turn {turn}")
        assert cached == 0
        cluster.wait_reported()
        found, cached = ask(cluster, prompt)
        assert cached == known // BLOCK * BLOCK
        assert found == expected
    cluster.wait_reported()
    pulls_after, tokens_after = counted(cluster)
    assert pulls_after - pulls >= 3
    assert tokens_after - tokens >= 3 * (NUM_TOKENS - BLOCK)

    before = {w["worker_id"]: w["blocks"]["cached"] for w in cluster.workers("decode")}
    answer, _ = ask(cluster, prompt)
    cluster.wait_reported()
    holder = max(cluster.workers("decode"), key=lambda w: w["blocks"]["cached"] - before[w["worker_id"]])
    prompt = [*prompt, *answer, 7, 8, 9]
    expected, _ = ask(cluster, prompt, salt="frozen")
    os.kill(holder["pid"], signal.SIGSTOP)
    try:
        assert ask(cluster, prompt)[0] == expected
    finally:
        os.kill(holder["pid"], signal.SIGCONT)
    cluster.wait_whole(2, 2)
    cluster.wait_at_rest()
