"""A model whose layers all have a sliding window: what is generated is transformers' own, and a sequence
holds only the window's blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e.cluster import HTTP, NEVER_DEAD, Cluster, running
from support.greedy import greedy_tokens
from support.models import make_checkpoint
from transformers import PreTrainedModel

WINDOW, BLOCK, NUM_BLOCKS = 24, 16, 40
NUM_STREAMS, PROMPT_LEN, NUM_TOKENS = 8, 150, 200
PROMPTS = [
    [(i * 13 + i // 7 + 31 * stream) % 250 for i in range(PROMPT_LEN)] for stream in range(NUM_STREAMS)
]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("mistral")
    return folder, make_checkpoint(folder, "mistral", sliding_window=WINDOW)


@pytest.fixture(scope="module")
def cluster(
    mistral: tuple[Path, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    arguments = ("--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK), "--exact", *NEVER_DEAD)
    with running(mistral[0], tmp_path_factory.mktemp("window"), *arguments) as cluster:
        yield cluster


def generated(cluster: Cluster, prompt: list[int]) -> list[int]:
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = cluster.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, extra_body=extra
    )
    ids: list[int] = answer.choices[0].model_dump()["token_ids"]
    return ids


def test_many_long_sequences_share_a_pool_that_holds_two_of_them_whole(
    cluster: Cluster, mistral: tuple[Path, PreTrainedModel]
) -> None:
    """Each would take 22 blocks; its window takes four at most."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = list(pool.map(lambda prompt: generated(cluster, prompt), PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer == greedy_tokens(mistral[1], prompt, answer, NUM_TOKENS)
    assert re.search(
        r"^splitserve_\w*preemptions\w*(?:\{[^}]*\})? 0.0$",
        HTTP.get(f"{cluster.url}/metrics").text,
        re.MULTILINE,
    )
    cluster.wait_at_rest()
