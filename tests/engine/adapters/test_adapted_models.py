"""One batch with several adapters answers as transformers does with each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.adapters import save_adapter, save_adapters
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.families import FAMILIES, VOCAB_SIZE
from support.models import make_checkpoint
from transformers import PreTrainedModel

from splitserve.engine.adapters.files import read_adapter
from splitserve.engine.adapters.resident import ResidentAdapters
from splitserve.engine.errors import AdapterError
from splitserve.engine.step.model_runner import ModelRunner

ATTENTION = (
    r"(?!.*vision).*\.self_attn\.(q_proj|k_proj|v_proj|o_proj|qkv_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa)"
)
DENSE = rf"{ATTENTION}|(?!.*vision).*layers\.\d+\.mlp\.(gate_proj|up_proj|down_proj|gate_up_proj)"
BLOCK_SIZE, NUM_BLOCKS, PROMPT_LEN, NUM_TOKENS = 16, 48, 45, 12


def make_runner(folder: Path, **settings: Any) -> ModelRunner:
    asked = {"dtype": "float32", "lora_folder": folder, "max_loras": 3, **settings}
    return ModelRunner(engine_config(folder, "cpu", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, **asked))


def prompt_of(seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, PROMPT_LEN)]


def answers(runner: ModelRunner, contents: list[str], chunk: int = 17) -> list[list[int]]:
    """One batch: each prompt in chunks, some rows already decoding beside them."""
    per = -(-(PROMPT_LEN + NUM_TOKENS) // BLOCK_SIZE)
    sequences = [
        HandSequence(prompt_of(i), list(range(per * (i + 1) - 1, per * i - 1, -1)), adapter=content)
        for i, content in enumerate(contents)
    ]
    while any(len(s.output) < NUM_TOKENS for s in sequences):
        steps = []
        for i, s in enumerate(s for s in sequences if len(s.output) < NUM_TOKENS):
            steps.append((s, min(chunk + 5 * i, len(s.token_ids) - s.num_computed)))
        tokens = runner.execute(make_batch(steps, BLOCK_SIZE)).token_ids.tolist()
        for (s, count), token in zip(steps, tokens, strict=True):
            s.num_computed += count
            if token >= 0:
                s.output.append(token)
    return [s.output for s in sequences]


ADAPTERS = {"first": (0, 1), "second": (2,)}
"""Which of four prompts have which; the last one has none."""


class Adapted:
    """Two adapters, in ``folder``: the contents of a batch of four, and what transformers answers."""

    def __init__(self, model: PreTrainedModel, folder: Path, **changes: Any) -> None:
        changes = {"target_modules": DENSE, **changes}
        self._model = save_adapters(model, folder, {"first": 11, "second": 12}, **changes)
        self.contents = [read_adapter(folder / n).content for n, rows in ADAPTERS.items() for _ in rows] + [
            ""
        ]

    def greedy(self, found: list[list[int]]) -> list[list[int]]:
        """Return the tokens rated highest after each prompt, and after each token of ``found`` behind it.

        They are ``found`` if it is the greedy answer, and only then."""
        expected = []
        for name, rows in ADAPTERS.items():
            self._model.set_adapter(name)
            expected += highest(self._model, {row: found[row] for row in rows})
        with self._model.disable_adapter():
            return expected + highest(self._model, {3: found[3]})


@torch.inference_mode()
def highest(model: torch.nn.Module, found: dict[int, list[int]]) -> list[list[int]]:
    """By one pass. ``found``: answers by the seed of the prompt."""
    tokens = torch.tensor([[*prompt_of(seed), *answer[:-1]] for seed, answer in found.items()])
    ratings: list[list[int]] = model(input_ids=tokens).logits[:, PROMPT_LEN - 1 :].argmax(-1).tolist()
    return ratings


def place(runner: ModelRunner, folder: Path) -> ResidentAdapters:
    resident = ResidentAdapters(runner.ranks)
    for slot, name in ((2, "first"), (1, "second")):
        file = read_adapter(folder / name)
        resident.check(file)
        resident.put(slot, file)
    return resident


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family: str, tmp_path: Path) -> None:
    """Alone, and split among ranks: by exact mode's way of splitting, too."""
    model = make_checkpoint(tmp_path / "model", family)
    changed = (
        "deepseek",
        "ernie4_5_moe",
        "exaone_moe",
        "glm4_moe",
        "glm_moe_dsa",
        "glm4v_moe",
        "kimi",
        "mellum",
    )  # peft would change experts
    layers = ATTENTION if family.startswith(changed) else DENSE
    adapted = Adapted(model, tmp_path, target_modules=layers)
    expected: list[list[int]] = []
    for settings in ({}, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "exact": True}):
        runner = make_runner(tmp_path / "model", **settings)
        place(runner, tmp_path)
        found = answers(runner, adapted.contents)
        expected = expected or adapted.greedy(found)
        assert found == expected, settings
    assert len({tuple(answer) for answer in expected}) == 4


@pytest.mark.parametrize(
    "changes", [{"use_rslora": True}, {"r": 3, "target_modules": ["v_proj", "down_proj"]}]
)
def test_ranks_and_scales(changes: dict[str, Any], tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama3")
    adapted = Adapted(model, tmp_path, **changes)
    runner = make_runner(tmp_path / "model")
    place(runner, tmp_path)
    found = answers(runner, adapted.contents)
    assert found == adapted.greedy(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_bits_do_not_depend_on_the_batch(dtype: str, tmp_path: Path) -> None:
    """A prompt's logprobs with an adapter are the same alone and beside others; without one they are those
    of a worker without adapters."""
    model = make_checkpoint(tmp_path / "model", "qwen3")
    contents = Adapted(model, tmp_path).contents
    runner = make_runner(tmp_path / "model", dtype=dtype, exact=True)
    place(runner, tmp_path)
    alone = [logprobs(runner, [content])[0] for content in contents]
    assert logprobs(runner, contents) == alone
    assert alone[0] != alone[3], "one has an adapter, the other none"
    plain = make_runner(tmp_path / "model", dtype=dtype, exact=True, lora_folder=None)
    assert logprobs(plain, [""])[0] == alone[3]


def logprobs(runner: ModelRunner, contents: list[str]) -> list[list[float]]:
    """Return the logprobs of one prompt with each of these."""
    sequences = [
        HandSequence(prompt_of(7), list(range(4 * i, 4 * i + 4)), adapter=c) for i, c in enumerate(contents)
    ]
    batch = make_batch([(s, PROMPT_LEN) for s in sequences], BLOCK_SIZE, prompt_logprobs=0)
    found = runner.execute(batch).prompt_logprobs
    return [[entry.logprob for entry in found[i]] for i in range(len(contents))]


def test_a_slot_is_used_again(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama3")
    adapted = Adapted(model, tmp_path)
    runner = make_runner(tmp_path / "model")
    resident = place(runner, tmp_path)
    resident.put(1, read_adapter(tmp_path / "first"))
    found = answers(runner, ["", adapted.contents[1], "", ""])
    assert found[1] == adapted.greedy(found)[1]
    with pytest.raises(AdapterError, match="not on this worker"):
        answers(runner, [adapted.contents[2]])


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("llama3", {"r": 17}, "its rank is 17, more than --max-lora-rank 16: raise that"),
        (
            "deepseek2",
            {"target_modules": ["kv_b_proj"]},
            "it changes model.layers.0.self_attn.kv_b_proj; adapters",
        ),
    ],
)
def test_what_does_not_fit(family: str, changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", family)
    save_adapter(model, tmp_path / "1", **changes)
    resident = ResidentAdapters(make_runner(tmp_path / "model").ranks)
    with pytest.raises(AdapterError, match=sentence):
        resident.check(read_adapter(tmp_path / "1"))
