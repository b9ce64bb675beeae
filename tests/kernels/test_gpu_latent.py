"""Attention over latent vectors and DeepSeek's routes on GPUs: in Triton's interpreter, on a played GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.gpu_runs import BLOCK_SIZE, NUM_BLOCKS, WAYS_TO_SAMPLE, on_played_gpu
from support.models import make_checkpoint
from torch import Tensor

from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.kernel_inputs import (
    LAYER,
    AttentionCase,
    attention_case,
    mixture_weights,
    quarters,
    randn,
    relative_error,
)
from splitserve.engine import loaded_model
from splitserve.engine.errors import ModelConfigError
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu.latent_attention import latent_attention
from splitserve.kernels.gpu.mixture import route
from splitserve.kernels.mixture_shape import MixtureShape
from splitserve.kernels.reference import TorchKernels, routes

triton_interpreter.install()
ALLOWED = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
REFERENCE = TorchKernels()


def case_of(
    lengths: list[int], queries: list[int], heads: int, head_dim: int, dtype: torch.dtype
) -> AttentionCase:
    case = attention_case(lengths, queries, group=heads, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    return replace(case, pool=case.pool[:, :, :1].contiguous())


def attend(case: AttentionCase, num_sms: int = 6, exact: bool = False) -> Tensor:
    return latent_attention(case.q, case.pool, LAYER, replace(case.inputs, plans={}), num_sms, exact)


@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [(3, 24, torch.float32), (20, 40, torch.float32), (70, 24, torch.bfloat16), (4, 576, torch.bfloat16)],
)
@pytest.mark.parametrize("exact", [False, True])
def test_latent_attention(heads: int, head_dim: int, dtype: torch.dtype, exact: bool) -> None:
    """Decode rows, in ranges if not exact; and chunks. A length of 0 is a padding row, whose output is 0."""
    for lengths, queries in (([1, 70, 17], [1, 1, 1]), ([20, 5], [6, 5])):
        case = case_of(lengths, queries, heads, head_dim, dtype)
        inputs = replace(case.inputs, plans={})
        expected = REFERENCE.paged_attention(case.q.float(), case.pool.float(), LAYER, inputs)
        assert relative_error(attend(case, exact=exact), expected) < ALLOWED[dtype]
    padded = case_of([33, 0], [1, 0], heads, head_dim, dtype)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    both = replace(
        padded, q=padded.q.expand(2, -1, -1), inputs=replace(padded.inputs, query_start_loc=starts)
    )
    assert not attend(both, exact=exact)[1].any()


def test_exact_rows_have_the_same_bits_prefilled_in_chunks_and_decoded() -> None:
    case = case_of([60], [20], 4, 40, torch.bfloat16)
    whole = attend(case, exact=True)
    for start, stop in ((0, 7), (7, 8), (8, 20)):
        starts, lens = (torch.tensor(of, dtype=torch.int32) for of in ([0, stop - start], [40 + stop]))
        inputs = replace(case.inputs, query_start_loc=starts, seq_lens=lens)
        assert torch.equal(
            attend(replace(case, q=case.q[start:stop], inputs=inputs), exact=True), whole[start:stop]
        )


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize(("experts", "groups", "chosen_groups"), [(16, 4, 2), (12, 3, 1), (16, 1, 1)])
def test_routes(experts: int, groups: int, chosen_groups: int, sigmoid: bool, corrected: bool) -> None:
    shape = MixtureShape(
        experts, 3, 32, 16, sigmoid, "silu", 24, False, sigmoid, groups, chosen_groups, factor=2.5
    )
    logits, correction = randn(9, experts), randn(experts, seed=3) if corrected else None
    expected, weights = routes(logits, shape, correction)
    found, found_weights = route(logits, shape, correction)
    assert torch.equal(found, expected.int())
    assert relative_error(found_weights, weights) < 1e-6
    made = mixture_weights(replace(shape, shared_gated=True), torch.float32)
    made = replace(made, shape=shape, router=made.router[:experts], correction=correction)
    x = quarters(4, 32, dtype=torch.float32)
    assert relative_error(CudaKernels(1).mixture(made)(x), REFERENCE.mixture(made)(x)) < 1e-5


def runner_on(device: str, folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner(
        engine_config(folder, device, "float32", BLOCK_SIZE, NUM_BLOCKS, max_model_len=40, **options)
    )


@pytest.mark.parametrize("family", ["deepseek2", "deepseek3"])
def test_deepseek_runs_as_in_torch(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Callable[[str, str, str], None]
) -> None:
    """A prompt, then a decode step; a float8 cache is refused."""
    tried(family, "gpu", "float32")
    make_checkpoint(tmp_path, family, num_hidden_layers=2)

    def tokens(runner: ModelRunner) -> list[int]:
        sequence, found = HandSequence([5, 7, 9, 11, 2], [3], WAYS_TO_SAMPLE[1]), list[int]()
        for count in (5, 1):
            found += runner.execute(make_batch([(sequence, count)], BLOCK_SIZE)).token_ids.tolist()
            sequence.num_computed += count
            sequence.output.append(found[-1])
        return [*found, *runner.kv_cache.pool[3].flatten().mul(1e4).round().int().tolist()]

    monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: TorchKernels())
    expected = tokens(runner_on("cpu", tmp_path))
    with on_played_gpu(monkeypatch):
        found = tokens(runner_on("cuda", tmp_path))
        with pytest.raises(ModelConfigError, match="no float8 KV cache on GPUs"):
            runner_on("cuda", tmp_path, kv_dtype="fp8")
    assert found[:2] == expected[:2]
    assert max(abs(one - other) for one, other in zip(found[2:], expected[2:], strict=True)) <= 2
