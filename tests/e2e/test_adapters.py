"""Adapters in a real cluster: added, replaced and removed while it serves; streams of several at once, also
when a worker is killed; each gives what transformers gives with peft."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import NamedTuple

import pytest
from e2e.cluster import HTTP, MODEL_NAME, NEVER_DEAD, PATIENCE_S, Cluster, running, wait_for
from openai import NotFoundError
from support.adapters import save_adapters
from support.greedy import greedy_tokens
from support.models import make_checkpoint
from tokenizers import Tokenizer
from transformers import PreTrainedModel

NUM_TOKENS, LONG = 120, 900
PROMPTS = [[(i * 13 + i // 7) % 250 for i in range(count)] for count in (70, 150)]


class Answer(NamedTuple):
    """What was streamed."""

    tokens: list[int]
    text: str

    def begun(self) -> Answer:
        """Return one of fewer tokens; the text is whole."""
        return Answer(self.tokens[:NUM_TOKENS], self.text)


class Shelf:
    """Adapters beside the folder that is served, and transformers' model with all of them."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self.served, self._ready = folder / "served", folder / "ready"
        self.served.mkdir()
        self._tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
        seeds = {name: seed for seed, name in enumerate(("sql", "poet", "late", "newer"))}
        self._model = save_adapters(model, self._ready, seeds)

    def put(self, adapter: str, name: str) -> None:
        if (self.served / name).exists():
            os.rename(self.served / name, self._ready / f"was {name}")
        os.rename(self._ready / adapter, self.served / name)

    def take(self, name: str) -> None:
        os.rename(self.served / name, self._ready / f"gone {name}")

    def greedy(self, name: str, prompt: list[int], found: Answer) -> Answer:
        """Return transformers' answer with this adapter, if ``found`` is it; another one otherwise."""
        with self._model.disable_adapter() if name == MODEL_NAME else nullcontext():
            if name != MODEL_NAME:
                self._model.set_adapter(name)
            tokens = greedy_tokens(self._model, prompt, found.tokens, len(found.tokens))
        return Answer(tokens, self._tokenizer.decode(tokens))

    def all_greedy(self, found: dict[str, list[Answer]]) -> dict[str, list[Answer]]:
        return {
            name: [self.greedy(name, prompt, one) for prompt, one in zip(PROMPTS, answers, strict=True)]
            for name, answers in found.items()
        }


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
) -> Answer:
    """Return what is streamed; ``began`` is set with its first piece."""
    stream = cluster.client.completions.create(
        model=name, prompt=prompt, max_tokens=num_tokens, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    tokens, pieces = list[int](), []
    for chunk in stream:
        assert chunk.model == name
        for choice in chunk.choices:
            pieces.append(choice.text)
            tokens += choice.model_dump().get("token_ids") or []
        if began:
            began.set()
    assert len(tokens) == num_tokens
    return Answer(tokens, "".join(pieces))


def all_answers(
    cluster: Cluster, adapters: list[str], num_tokens: int = NUM_TOKENS, began: Event | None = None
) -> dict[str, list[Answer]]:
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
    found = all_answers(cluster, asked)
    assert found == shelf.all_greedy(found)
    assert len({answer.text for answers in found.values() for answer in answers}) == 6
    assert all_answers(cluster, asked) == found, "from each one's own cached blocks"
    cluster.wait_at_rest()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, shelf: Shelf) -> dict[str, list[Answer]]:
    """Answers that are long enough to be caught in the middle. Their beginnings are compared with peft's."""
    answers = all_answers(cluster, [MODEL_NAME, "sql", "poet"], LONG)
    begun = {name: [one.begun() for one in found] for name, found in answers.items()}
    for name, found in shelf.all_greedy(begun).items():
        assert [one.tokens for one in found] == [one.tokens for one in begun[name]]
        assert all(one.text.startswith(peft.text) for one, peft in zip(begun[name], found, strict=True))
    return answers


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_worker_loses_no_token(
    cluster: Cluster, undisturbed: dict[str, list[Answer]], role: str
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
    late = [answer(cluster, "late", prompt) for prompt in PROMPTS]
    assert shelf.all_greedy({"late": late}) == {"late": late}
    shelf.put("newer", "late")

    def is_newer() -> bool:
        found = answer(cluster, "late", PROMPTS[0])
        return found == shelf.greedy("newer", PROMPTS[0], found)

    wait_for("the new one is served", is_newer)
    found = all_answers(cluster, ["late", "sql"])
    expected = shelf.all_greedy({"newer": found["late"], "sql": found["sql"]})
    assert found == {"late": expected["newer"], "sql": expected["sql"]}
    shelf.take("late")
    wait_for("it is served no more", lambda: "late" not in names(cluster))
    with pytest.raises(NotFoundError, match=r"late.*sql"):
        answer(cluster, "late", PROMPTS[0])
    cluster.wait_at_rest()
