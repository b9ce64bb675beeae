"""Drafts by the model's own layer on several ranks, in replayed steps, and while layers are reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.batches import HandSequence
from support.prediction import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Reference,
    make_predicting,
    make_runner,
    predicting_batch,
    random_tokens,
    run,
    sequence_of,
    with_draft_rows,
)
from torch import Tensor

from splitserve.bench.kernels import triton_interpreter
from splitserve.engine import loaded_model
from splitserve.engine.step.device_sampler import DeviceSampler
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu.attention_tiles import TileShape

triton_interpreter.install()
PROMPT_LEN = 40


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["deepseek3", "glm4_moe"])
def test_ranks_draft_as_one_and_pass_blocks_on(family: str, dtype: str, tmp_path: Path) -> None:
    reference, prompt = make_predicting(tmp_path, family), random_tokens(PROMPT_LEN, seed=3)
    runners = [make_runner(tmp_path, dtype, tensor_parallel_size=size) for size in (1, 2, 2)]
    sequence, found = sequence_of(prompt, seed=1), []
    run(runners[1], [(sequence, 23)])
    run(runners[1], [(sequence, 17)])
    blocks = runners[1].kv_cache.block_bytes_view[sequence.blocks].copy()
    for runner in runners:
        runner.kv_cache.block_bytes_view[sequence.blocks] = blocks
        here = replace(sequence, output=list(sequence.output))
        for _ in range(3):
            drafts = run(runner, [(here, 1)], num_drafts=3).drafts[0]
            found.append(drafts)
            if dtype == "float32":
                assert drafts == reference.drafts(here.token_ids, 3)
    assert found[3:6] == found[6:]


def test_each_rank_drafts_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_predicting(tmp_path, "glm4_moe")
    runner, drafts = make_runner(tmp_path, "bfloat16", tensor_parallel_size=2), list[Tensor]()
    for each in runner._all._runners:
        assert each._next_drafts is not None
        draft = each._next_drafts._draft

        def noted(*inputs: object, draft: Callable[..., Tensor] = draft) -> Tensor:
            drafts.append(draft(*inputs))
            return drafts[-1]

        monkeypatch.setattr(each._next_drafts, "_draft", noted)
    run(runner, [(sequence_of(random_tokens(PROMPT_LEN, seed=3), seed=1), PROMPT_LEN)], num_drafts=3)
    assert len(drafts) == 2
    assert torch.equal(*drafts)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["deepseek3", "glm4_moe"])
def test_the_layer_is_reported_once_it_is_written(family: str, size: int, tmp_path: Path) -> None:
    make_predicting(tmp_path, family)
    runner, seen = make_runner(tmp_path, tensor_parallel_size=size), list[np.ndarray]()
    layers, sequence = runner.kv_cache.layer_bytes_view, sequence_of(random_tokens(33, seed=3), seed=1)
    batch = predicting_batch([(sequence, 33)], BLOCK_SIZE)
    runner.execute(batch, on_layer=lambda n: seen.append(layers[sequence.blocks[:3], :n].copy()))
    counts = [view.shape[1] for view in seen]
    assert (counts[0], counts[-2:]) == (0, [3, 4])
    for view in seen:
        np.testing.assert_array_equal(view, layers[sequence.blocks[:3], : view.shape[1]])


@pytest.mark.parametrize("size", [1, 2])
def test_a_request_that_cannot_be_sampled_leaves_no_rank_waiting(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = make_predicting(tmp_path, "glm4_moe")
    runner, sequence = make_runner(tmp_path, tensor_parallel_size=size), sequence_of([5, 6, 7], seed=1)
    reported: list[int] = []

    def fail(*_: object) -> None:
        raise ValueError("no such grammar")

    with monkeypatch.context() as patched:
        patched.setattr(runner._sampler, "sample", fail)
        batch = predicting_batch([(sequence, 3)], BLOCK_SIZE, num_drafts=2)
        with pytest.raises(ValueError, match="no such grammar"):
            runner.execute(batch, reported.append)
    assert reported[-1] < runner.kv_cache.layout.num_layers, "what is computed again has not left"
    assert len({rank.num_calls for rank in (each.rank for each in runner.ranks)}) == 1
    assert run(runner, [(sequence, 3)], num_drafts=2).drafts[0] == reference.drafts(sequence.token_ids, 2)


@pytest.fixture(params=["glm4_moe", "deepseek3"])
def on_gpu(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Reference, ModelRunner]:
    """With the GPU's kernels, in Triton's interpreter."""
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    reference = make_predicting(tmp_path, request.param, **sizes)
    kernels = CudaKernels(num_sms=1, prefill_shape=TileShape(16, 32, 4, 3))
    monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: kernels)
    sizes = {"max_model_len": 96, "max_decode_seqs": 3, "max_prefill_tokens": 64}
    return reference, make_runner(tmp_path, **sizes)


def replayed(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    result = compute()
    return lambda: result.copy_(compute())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a poisoned slot beside the ones in use
def test_replayed_steps_draft_as_plain_ones(on_gpu: tuple[Reference, ModelRunner]) -> None:
    reference, gpu_runner = on_gpu

    def steps() -> list[object]:
        gpu_runner._sampler = DeviceSampler((2,))
        sequences = [sequence_of(random_tokens(count, seed=count), seed=1) for count in (9, 18)]
        sequences[1].blocks = [block for block in range(NUM_BLOCKS) if block not in sequences[0].blocks][:3]
        found: list[object] = [run(gpu_runner, [(s, len(s.prompt)) for s in sequences]).token_ids.tolist()]
        found.append(fed_step(gpu_runner, sequences))
        output = run(gpu_runner, [(s, 1) for s in sequences], num_drafts=2)
        assert output.drafts == {i: reference.drafts(s.token_ids, 2) for i, s in enumerate(sequences)}
        drafted = [(sequences[0], [*reference.answer(sequences[0].token_ids, 1), 7])]
        output = gpu_runner.execute(with_draft_rows(drafted, BLOCK_SIZE, [2, 2, 1]))
        assert list(output.drafts) == [2 if output.token_ids[1] == 7 else 1]
        return [*found, output.token_ids.tolist(), output.drafts]

    gpu_runner.kv_cache.pool.fill_(torch.nan)
    plain, written = steps(), gpu_runner.kv_cache.pool.isnan()
    gpu_runner.kv_cache.pool.fill_(7.0)
    gpu_runner.capture(replayed)
    assert (gpu_runner.kv_cache.pool == 7.0).all(), "a recording has only padding"
    assert gpu_runner._prefill_graphs is None
    gpu_runner.kv_cache.pool.fill_(torch.nan)
    assert steps() == plain
    assert torch.equal(gpu_runner.kv_cache.pool.isnan(), written)


def fed_step(runner: ModelRunner, sequences: list[HandSequence]) -> list[int]:
    """One that is made while the step before runs."""
    batch = predicting_batch([(s, 1) for s in sequences], BLOCK_SIZE)
    fed_from = np.arange(len(sequences), dtype=np.int32)
    batch = replace(batch, token_ids=np.zeros_like(batch.token_ids), fed_from=fed_from, next_ids=None)
    tokens: list[int] = runner.launch(batch)().token_ids.tolist()
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.output.append(token)
        sequence.num_computed += 1
    return tokens
