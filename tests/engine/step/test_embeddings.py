"""The hidden state that an embedding is made of: as transformers computes it, in chunks, over cached
prefixes, split among ranks, beside others; and of checkpoints without a head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.families import VOCAB_SIZE
from support.models import make_checkpoint
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from splitserve.engine.errors import WeightsError
from splitserve.engine.step.model_runner import ModelRunner

BLOCK_SIZE, NUM_BLOCKS = 8, 160
Vector = NDArray[np.float32]
Work = list[tuple[HandSequence, int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "qwen3", tie_word_embeddings=False)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def make_runner(folder: Path, size: int = 1, exact: bool = False) -> ModelRunner:
    config = engine_config(
        folder, "cpu", "float32", BLOCK_SIZE, NUM_BLOCKS, tensor_parallel_size=size, exact=exact
    )
    runner = ModelRunner(config)
    runner.kv_cache.pool.fill_(torch.nan)
    return runner


def sequence(length: int, seed: int, first_block: int) -> HandSequence:
    prompt = [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB_SIZE, length)]
    return HandSequence(prompt, list(range(first_block, first_block + length // BLOCK_SIZE + 1)))


def step(runner: ModelRunner, work: Work, embeds: list[Any], rows: Work | None = None) -> dict[int, Vector]:
    """Run chunks behind decode rows, if there are any. Chunks that embed sample nothing."""
    batch = make_batch(work, BLOCK_SIZE)
    sampling = [
        state if wanted is None else None for state, wanted in zip(batch.sampling, embeds, strict=True)
    ]
    batch = replace(batch, sampling=sampling, embeds=embeds)
    if rows:
        batch = make_batch(rows, BLOCK_SIZE).followed_by(batch)
    found = runner.execute(batch).split(len(rows or ()))[1].embeddings
    for each, count in work:
        each.num_computed += count
    return found


def embedded(runner: ModelRunner, one: HandSequence, *chunks: int) -> Vector:
    for count in chunks:
        assert step(runner, [(one, count)], [None]) == {}
    found = step(runner, [(one, len(one.prompt) - one.num_computed)], [()])
    return found[0]


@torch.inference_mode()
def expected(reference: PreTrainedModel, prompt: list[int]) -> Vector:
    state: Vector = reference(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
    return state


def unit(vector: Vector) -> Vector:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("chunks", [(), (17, 8, 30)])
def test_as_transformers(
    folder: Path, reference: PreTrainedModel, size: int, chunks: tuple[int, ...]
) -> None:
    runner, one = make_runner(folder, size), sequence(75, 1, 3)
    found = embedded(runner, one, *chunks)
    assert found.dtype == np.float32
    np.testing.assert_allclose(unit(found), unit(expected(reference, one.prompt)), atol=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_over_a_cached_prefix(folder: Path, reference: PreTrainedModel, size: int) -> None:
    runner, first = make_runner(folder, size), sequence(75, 1, 3)
    embedded(runner, first)
    other = sequence(20, 2, 60)
    prompt = first.prompt[:64] + other.prompt
    second = HandSequence(prompt, [*first.blocks[:8], *other.blocks], num_computed=64)
    found = embedded(runner, second)
    np.testing.assert_allclose(unit(found), unit(expected(reference, prompt)), atol=1e-5)


def test_one_token(folder: Path, reference: PreTrainedModel) -> None:
    one = sequence(1, 4, 3)
    found = embedded(make_runner(folder), one)
    np.testing.assert_allclose(unit(found), unit(expected(reference, one.prompt)), atol=1e-5)


def test_exact_mode_gives_the_same_bits_in_any_company(folder: Path) -> None:
    """Alone; in chunks; among other embeddings, prompts that sample, and decode rows."""
    runner = make_runner(folder, exact=True)
    alone = embedded(runner, sequence(41, 5, 0))
    assert np.array_equal(embedded(runner, sequence(41, 5, 10), 9, 16), alone)
    row, others = sequence(30, 6, 20), [sequence(length, length, 30 + length) for length in (12, 33, 50)]
    runner.execute(make_batch([(row, 30)], BLOCK_SIZE))
    row.num_computed, row.output = 30, [7]
    mine = sequence(41, 5, 120)
    work = [(others[0], 12), (mine, 41), (others[1], 33), (others[2], 20)]
    found = step(runner, work, [(), (), None, None], rows=[(row, 1)])
    assert found.keys() == {0, 1}, "of those that ask for it"
    assert np.array_equal(found[1], alone)
    assert not np.array_equal(found[0], alone)


@pytest.mark.parametrize(("size", "exact"), [(1, False), (2, False), (1, True)])
def test_logits_beside_hidden_states(folder: Path, size: int, exact: bool) -> None:
    """In the order of the tokens; beside an embedding and a prompt that samples."""
    runner, wanted = make_runner(folder, size, exact), [(7, 3), (), None, (5,)]
    work = [(sequence(length, length, 40 * i), length) for i, length in enumerate((12, 33, 50, 41))]
    found = step(runner, work, wanted)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = [model(torch.tensor([one.prompt])).logits[0, -1].numpy() for one, _ in work]
    assert found.keys() == {0, 1, 3}
    np.testing.assert_allclose(found[0], logits[0][[7, 3]], atol=1e-4)
    np.testing.assert_allclose(found[3], logits[3][[5]], atol=1e-4)
    assert found[1].shape == (model.config.hidden_size,)


def bare(folder: Path, path: Path, architecture: str) -> Path:
    """The checkpoint as sentence-transformers saves it: no head, and no ``model.`` before names."""
    path.mkdir()
    tensors = load_file(folder / "model.safetensors")
    kept = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    assert len(kept) == len(tensors) - 1
    save_file(kept, path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return path


@pytest.mark.parametrize("architecture", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_a_checkpoint_without_head(
    folder: Path, reference: PreTrainedModel, tmp_path: Path, architecture: str
) -> None:
    path = bare(folder, tmp_path / "bare", architecture)
    if architecture == "Qwen3ForCausalLM":
        with pytest.raises(WeightsError, match="missing: lm_head"):
            make_runner(path)
        (path / "modules.json").write_text("[]")
    one = sequence(20, 9, 0)
    found = embedded(make_runner(path), one)
    np.testing.assert_allclose(unit(found), unit(expected(reference, one.prompt)), atol=1e-5)


def test_a_head_that_is_there_is_used(folder: Path, tmp_path: Path) -> None:
    """A checkpoint of sentence-transformers may have one."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    (tmp_path / "modules.json").write_text("[]")
    one = sequence(20, 9, 0)
    batch = make_batch([(one, 20)], BLOCK_SIZE, prompt_logprobs=3)
    with_head, plain = (make_runner(path).execute(batch) for path in (tmp_path, folder))
    assert with_head.prompt_logprobs == plain.prompt_logprobs


@pytest.mark.parametrize(
    ("family", "architecture"), [("gemma3", "Gemma3TextModel"), ("gemma4", "Gemma4TextModel")]
)
def test_the_text_model_of_gemma(tmp_path: Path, family: str, architecture: str) -> None:
    """Its name has a word more than that of the model with a head."""
    whole = make_checkpoint(tmp_path / "whole", family, tie_word_embeddings=False)
    whole.model.save_pretrained(tmp_path / "bare")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert config["architectures"] == [architecture]
    one = sequence(40, 9, 0)
    found = embedded(make_runner(tmp_path / "bare"), one)
    reference = AutoModel.from_pretrained(tmp_path / "bare", dtype=torch.float32).eval()
    np.testing.assert_allclose(unit(found), unit(expected(reference, one.prompt)), atol=1e-5)
