"""A model most of whose layers have a state in place of keys and values: what is generated is what
transformers would choose, also after a worker's death and a move. A prompt begins behind another's state."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.cluster import MODEL_NAME, NEVER_DEAD, Cluster, running, wait_for
from support.models import make_checkpoint
from transformers import PreTrainedModel

NUM_TOKENS, BLOCK = (400, 200, 200), 16
LONG = 2500  # tokens: seconds, to be caught in the middle
CAUGHT_WITHIN_S = 200.0  # on a machine where the observer waits longer for a core than the worker
PROMPTS = [[(i * 13 + i // 7 + 31 * stream) % 250 for i in range(100)] for stream in range(len(NUM_TOKENS))]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("qwen")
    return folder, make_checkpoint(folder, "qwen3_next", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def cluster(
    qwen: tuple[Path, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    arguments = ("--decode", "2", "--num-blocks", "600", "--block-size", str(BLOCK), *NEVER_DEAD)
    with running(qwen[0], tmp_path_factory.mktemp("hybrid"), *arguments) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(cluster: Cluster, qwen: tuple[Path, PreTrainedModel]) -> list[list[int]]:
    """The undisturbed answers. Transformers reads each in one pass, and would have chosen each token."""
    answers = [list(streamed(cluster, *asked)) for asked in zip(PROMPTS, NUM_TOKENS, strict=True)]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.inference_mode():
            logits = qwen[1](torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.amax(1), rtol=0, atol=1e-4)
    return answers


def continued(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    length = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "eos_token_id": None}
    with torch.inference_mode():
        ids = model.generate(torch.tensor([prompt]), do_sample=False, **length)
    answer: list[int] = ids[0, len(prompt) :].tolist()
    return answer


def streamed(cluster: Cluster, prompt: list[int], num_tokens: int) -> Iterator[int]:
    extra: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    with cluster.client.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=num_tokens, temperature=0, stream=True, extra_body=extra
    ) as chunks:
        for chunk in chunks:
            for choice in chunk.choices:
                yield from choice.model_dump().get("token_ids") or ()


def test_streams_outlive_a_decode_worker(cluster: Cluster, expected: list[list[int]]) -> None:
    """Their states are computed again from the tokens that the clients have."""
    cluster.wait_whole(1, 2)
    first = streamed(cluster, PROMPTS[0], NUM_TOKENS[0])
    begun = [next(first)]
    with ThreadPoolExecutor() as pool:
        asked = list(zip(PROMPTS, NUM_TOKENS, strict=True))[1:]
        others = [pool.submit(list, streamed(cluster, *each)) for each in asked]
        os.kill(cluster.busy_worker("decode")["pid"], signal.SIGKILL)
        answers = [begun + list(first), *(other.result() for other in others)]
    assert answers == expected
    cluster.wait_whole(1, 2)
    cluster.wait_at_rest()


def test_streams_move_to_another_decode_worker(cluster: Cluster, expected: list[list[int]]) -> None:
    """With their states: a worker that drains computes nothing again. (A stream may end before it moves.)"""
    cluster.wait_whole(1, 2)
    unmoved = list(streamed(cluster, PROMPTS[0], LONG))
    assert unmoved[: NUM_TOKENS[0]] == expected[0]
    before = cluster.state()["counters"]

    def moved() -> bool:
        first = streamed(cluster, PROMPTS[0], LONG)
        begun = list(islice(first, 20))  # the first one comes before the handoff
        os.kill(cluster.busy_worker("decode")["pid"], signal.SIGTERM)
        assert begun + list(first) == unmoved
        after = cluster.state()["counters"]
        assert after["redispatches"] == before["redispatches"], cluster.state()["last_retries"]
        cluster.wait_whole(1, 2)
        return bool(after["sequences_moved"] > before["sequences_moved"])

    wait_for("a stream is caught in a move", moved, CAUGHT_WITHIN_S)
    cluster.wait_at_rest()


def cached_tokens(cluster: Cluster, prompt: list[int]) -> tuple[list[int], int]:
    """Eight tokens, and how many of the prompt were not computed for them."""
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = cluster.client.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=8, temperature=0, extra_body=extra
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.choices[0].model_dump()["token_ids"], answer.usage.prompt_tokens_details.cached_tokens or 0


def test_a_prompt_begins_behind_another_ones_state(
    cluster: Cluster, qwen: tuple[Path, PreTrainedModel]
) -> None:
    """That of its last full block at first; of a shared beginning from the second prompt on that has it."""
    system = [(7 * i + 3) % 250 for i in range(80)]
    turn = [*system, *range(5, 60)]
    found = [cached_tokens(cluster, turn)[1], cached_tokens(cluster, [*turn, *range(9, 40)])[1]]
    assert found == [0, len(turn) // BLOCK * BLOCK]
    for i, cached in enumerate((0, 80, 80)):
        prompt = [*system, *[(i + 1) * 11] * 30]
        assert cached_tokens(cluster, prompt) == (continued(qwen[1], prompt, 8), cached)
