"""Chats with images: what is generated is what transformers would choose, also after a decode worker's death.
Another chat with the same image computes it no more; another image is never taken for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.cluster import MODEL_NAME, NEVER_DEAD, Cluster, running
from support.image_models import data_url, encoded, make_image_model, picture
from support.their_images import their_logits

NUM_TOKENS = 300
PNG = encoded(picture(150, 260))  # is resized
OTHER = encoded(picture(150, 260, seed=1))


Checkpoint = tuple[str, Path, Any]
"""Its family, its folder, and the model of transformers."""


@pytest.fixture(scope="module", params=["qwen3_vl", "internvl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, make_image_model(folder, request.param)


@pytest.fixture(scope="module")
def cluster(model: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    arguments = ("--decode", "2", "--num-blocks", "600", "--block-size", "16", *NEVER_DEAD)
    with running(model[1], tmp_path_factory.mktemp("images"), *arguments) as cluster:
        yield cluster


def asked(model: Checkpoint, *files: bytes, question: str = "What does this show?") -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": [*images, {"type": "text", "text": question}]}],
        "temperature": 0,
        "logit_bias": {str(model[2].config.image_token_id): -100},
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }


def streamed(cluster: Cluster, request: dict[str, Any]) -> Iterator[int]:
    with cluster.client.chat.completions.create(**request, max_tokens=NUM_TOKENS, stream=True) as chunks:
        for chunk in chunks:
            for choice in chunk.choices:
                yield from choice.model_dump().get("token_ids") or ()


def answered(cluster: Cluster, request: dict[str, Any]) -> tuple[list[int], list[int], int]:
    """The prompt's tokens, eight of the answer, and how many of the prompt were not computed for them."""
    answer = cluster.client.chat.completions.create(**request, max_tokens=8)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    fields = answer.model_dump()
    tokens = fields["choices"][0]["token_ids"]
    return fields["prompt_token_ids"], tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


def check(checkpoint: Checkpoint, prompt: list[int], answer: list[int], *files: bytes) -> None:
    """Transformers reads prompt, images and answer in one pass, and would have chosen each token."""
    family, _, model = checkpoint
    logits = their_logits(model, family, prompt + answer[:-1], len(prompt) - 1, *files)
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    torch.testing.assert_close(chosen, logits.amax(1), rtol=0, atol=1e-4)


def test_answers_are_those_of_transformers(cluster: Cluster, model: Checkpoint) -> None:
    found = {}
    for name, files in {"one": (PNG,), "other": (OTHER,), "both": (PNG, OTHER)}.items():
        prompt, tokens, cached = answered(cluster, asked(model, *files))
        check(model, prompt, tokens, *files)
        found[name] = tokens
        assert cached < 32 or name == "both", "another image's blocks were taken"
    assert found["one"] != found["other"]
    prompt, tokens, cached = answered(cluster, asked(model, PNG, question="And what is behind it?"))
    check(model, prompt, tokens, PNG)
    assert cached >= 32, "the image was computed again"
    cluster.wait_at_rest()


def test_a_stream_outlives_its_decode_worker(cluster: Cluster, model: Checkpoint) -> None:
    cluster.wait_whole(1, 2)
    request = asked(model, PNG, OTHER)
    undisturbed = list(streamed(cluster, request))
    check(model, answered(cluster, request)[0], undisturbed, PNG, OTHER)
    stream = streamed(cluster, request)
    begun = [next(stream) for _ in range(20)]
    os.kill(cluster.busy_worker("decode")["pid"], signal.SIGKILL)
    assert begun + list(stream) == undisturbed
    cluster.wait_whole(1, 2)
    cluster.wait_at_rest()
