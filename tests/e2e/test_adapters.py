"""Adapters in a real cluster: added, replaced and removed while it serves; streams of several at once, also
when a worker is killed; each gives what transformers gives with peft."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from e2e.cluster import HTTP, MODEL_NAME, NEVER_DEAD, PATIENCE_S, Cluster, running, wait_for
from openai import NotFoundError
from support.adapters import save_adapter
from support.models import make_checkpoint
from tokenizers import Tokenizer
from transformers import PreTrainedModel

NUM_TOKENS, LONG = 120, 900
PROMPTS = [[(i * 13 + i // 7) % 250 for i in range(count)] for count in (70, 150)]


class Shelf:
    """Adapters beside the folder that is served, each with transformers' answers."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self.served, self._ready = folder / "served", folder / "ready"
        self.served.mkdir()
        tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
        self.expected = {MODEL_NAME: [greedy(model, tokenizer, prompt) for prompt in PROMPTS]}
        for seed, name in enumerate(("sql", "poet", "late", "newer")):
            adapted = save_adapter(model, self._ready / name, seed)
            self.expected[name] = [greedy(adapted, tokenizer, prompt) for prompt in PROMPTS]
            adapted.unload()

    def put(self, adapter: str, name: str) -> None:
        if (self.served / name).exists():
            os.rename(self.served / name, self._ready / f"was {name}")
        os.rename(self._ready / adapter, self.served / name)

    def take(self, name: str) -> None:
        os.rename(self.served / name, self._ready / f"gone {name}")


@torch.inference_mode()
def greedy(model: Any, tokenizer: Tokenizer, prompt: list[int]) -> str:
    tokens = torch.tensor([prompt])
    out = model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NUM_TOKENS, do_sample=False,
        eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    text: str = tokenizer.decode(out[0, len(prompt) :].tolist())
    return text


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    folder = tmp_path_factory.mktemp("shelf")
    shelf = Shelf(folder, make_checkpoint(folder / "model", "llama2", seed=3, max_position_embeddings=4096))
    for name in ("sql", "poet"):
        shelf.put(name, name)
    return shelf


@pytest.fixture(scope="module")
def cluster(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    arguments = ("--prefill", "2", "--decode", "2", "--kv-cache-gib", "0.1", *NEVER_DEAD)
    arguments += ("--lora-folder", str(shelf.served), "--max-loras", "4", "--exact")
    with running(shelf.served.parent / "model", tmp_path_factory.mktemp("cluster"), *arguments) as cluster:
        yield cluster


def names(cluster: Cluster) -> dict[str, str | None]:
    """Return each model that is listed, and its parent."""
    return {model["id"]: model.get("parent") for model in HTTP.get(f"{cluster.url}/v1/models").json()["data"]}


def answer(
    cluster: Cluster, name: str, prompt: list[int], num_tokens: int = NUM_TOKENS, began: Event | None = None
) -> str:
    """Return the text of a stream; ``began`` is set with its first piece."""
    stream = cluster.client.completions.create(
        model=name, prompt=prompt, max_tokens=num_tokens, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    pieces = []
    for chunk in stream:
        assert chunk.model == name
        pieces += [choice.text for choice in chunk.choices]
        if began:
            began.set()
    return "".join(pieces)


def all_answers(
    cluster: Cluster, adapters: list[str], num_tokens: int = NUM_TOKENS, began: Event | None = None
) -> dict[str, list[str]]:
    """All at once, so that they share batches."""
    with ThreadPoolExecutor(16) as pool:
        futures = {
            name: [pool.submit(answer, cluster, name, prompt, num_tokens, began) for prompt in PROMPTS]
            for name in adapters
        }
        return {name: [future.result(100) for future in found] for name, found in futures.items()}


def test_answers_are_those_of_peft(cluster: Cluster, shelf: Shelf) -> None:
    assert names(cluster) == {MODEL_NAME: None, "sql": MODEL_NAME, "poet": MODEL_NAME}
    asked = [MODEL_NAME, "sql", "poet"]
    expected = {name: shelf.expected[name] for name in asked}
    assert all_answers(cluster, asked) == expected
    assert all_answers(cluster, asked) == expected, "from each one's own cached blocks"
    cluster.wait_at_rest()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, shelf: Shelf) -> dict[str, list[str]]:
    """Answers that are long enough to be caught in the middle; they go on where peft's end."""
    asked = [MODEL_NAME, "sql", "poet"]
    answers = all_answers(cluster, asked, LONG)
    for name in asked:
        assert all(map(str.startswith, answers[name], shelf.expected[name])), name
    return answers


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_worker_loses_no_token(
    cluster: Cluster, undisturbed: dict[str, list[str]], role: str
) -> None:
    cluster.wait_whole(2, 2)
    began = Event()
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(all_answers, cluster, list(undisturbed), LONG, began)
        assert began.wait(PATIENCE_S)
        os.kill(cluster.busy_worker(role)["pid"], signal.SIGKILL)
        assert answers.result(100) == undisturbed
    cluster.wait_whole(2, 2)
    cluster.wait_at_rest()


def test_one_is_added_replaced_and_removed(cluster: Cluster, shelf: Shelf) -> None:
    shelf.put("late", "late")
    wait_for("it is served", lambda: "late" in names(cluster))
    assert [answer(cluster, "late", prompt) for prompt in PROMPTS] == shelf.expected["late"]
    shelf.put("newer", "late")
    newer = shelf.expected["newer"]
    wait_for("the new one is served", lambda: answer(cluster, "late", PROMPTS[0]) == newer[0])
    assert all_answers(cluster, ["late", "sql"]) == {"late": newer, "sql": shelf.expected["sql"]}
    shelf.take("late")
    wait_for("it is served no more", lambda: "late" not in names(cluster))
    with pytest.raises(NotFoundError, match=r"late.*sql"):
        answer(cluster, "late", PROMPTS[0])
    cluster.wait_at_rest()
