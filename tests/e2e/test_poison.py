"""A request that kills whichever worker runs it ends with a clear error, and takes nobody else's stream
along."""

from __future__ import annotations

import openai
import pytest
from e2e.cluster import MODEL_NAME
from e2e.forked_cluster import ForkedCluster
from e2e.test_failure import Streams
from support.worker_nursery import KILLS

PROMPTS = [f"bystander {i} " * (i + 1) for i in range(4)]
NUM_TOKENS = 600
MOST_DEATHS = 5
"""LifecycleLimits.max_deaths, and one that is charged to no request: a decode worker may die before the
coordinator has read the first token, by which it learns that the prefill worker is done."""


@pytest.fixture(scope="module")
def expected(forked_cluster: ForkedCluster) -> list[str]:
    return Streams(forked_cluster, PROMPTS, NUM_TOKENS).texts()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_poisonous_request_ends_and_the_others_go_on(
    forked_cluster: ForkedCluster, expected: list[str], role: str
) -> None:
    cluster = forked_cluster
    cluster.wait_whole(2, 2)
    started = cluster.num_started
    streams = Streams(cluster, PROMPTS, NUM_TOKENS)
    streams.wait_under_way()
    with pytest.raises(openai.InternalServerError) as caught:
        cluster.client.completions.create(
            model=MODEL_NAME, prompt="poison", max_tokens=8, seed=KILLS[role], extra_body={"ignore_eos": True}
        )
    assert "workers in a row died while they ran this request" in str(caught.value)
    assert "not tried again" in str(caught.value)
    assert streams.texts() == expected
    cluster.wait_whole(2, 2)
    cluster.wait_at_rest()
    assert 1 < cluster.num_started - started <= MOST_DEATHS
