"""A whole model runs the same with the GPU's kernels (in Triton's interpreter) as with plain torch; and the
noise is the same noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.families import VOCAB_SIZE
from support.models import make_checkpoint

from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.kernel_inputs import relative_error
from splitserve.engine import loaded_model
from splitserve.engine.step.batch import StepOutput
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu.attention_tiles import TileShape
from splitserve.kernels.interface import Kernels
from splitserve.kernels.reference import TorchKernels
from splitserve.transport.messages.messages import SamplingParams

triton_interpreter.install()
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # a poisoned slot beside the ones in use
]

BLOCK_SIZE = 8
SMALL = TileShape(16, 32, 4, 3)


def three_steps(
    folder: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[StepOutput], torch.Tensor]:
    """A prompt in two chunks, the second beside another sequence's decode step, then a decode step of
    both."""
    monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: kernels)
    runner = ModelRunner(
        engine_config(folder, device="cpu", dtype="float32", block_size=BLOCK_SIZE, num_blocks=64)
    )
    runner.kv_cache.pool.fill_(torch.nan)
    random = np.random.default_rng(1)
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=5, logprobs=2)
    long = HandSequence(random.integers(0, VOCAB_SIZE, 30).tolist(), [9, 3, 50, 4], params)
    short = HandSequence(random.integers(0, VOCAB_SIZE, 7).tolist(), [1, 40], params)
    reported = []
    for steps in ([(long, 20), (short, 7)], [(long, 10), (short, 1)], [(long, 1), (short, 1)]):
        output = runner.execute(make_batch(steps, BLOCK_SIZE))
        for (sequence, count), token in zip(steps, output.token_ids.tolist(), strict=True):
            sequence.num_computed += count
            sequence.output += [token] if token >= 0 else []
        reported.append(output)
    return reported, runner.kv_cache.pool


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma4"])
def test_a_model_runs_the_same(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """qwen3: norms of q and k. mistral: sliding window, a head dimension that is no power of two. gemma4: its
    last layer sees a view of the pool."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma4" else {}
    make_checkpoint(tmp_path, family, num_hidden_layers=2, **kinds)
    expected, expected_pool = three_steps(tmp_path, TorchKernels(), monkeypatch)
    found, pool = three_steps(tmp_path, CudaKernels(num_sms=1, prefill_shape=SMALL), monkeypatch)
    assert torch.equal(pool.isnan(), expected_pool.isnan())
    assert relative_error(pool.nan_to_num(), expected_pool.nan_to_num()) < 1e-5
    for step, expected_step in zip(found, expected, strict=True):
        assert step.token_ids.tolist() == expected_step.token_ids.tolist()
        for row, reported in expected_step.logprobs.items():
            assert step.logprobs[row].top_ids == reported.top_ids
            assert step.logprobs[row].top_logprobs == pytest.approx(reported.top_logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "kernels", [TorchKernels(), CudaKernels(num_sms=1, prefill_shape=SMALL)], ids=["torch", "triton"]
)
def test_rows_of_a_step_see_the_drafts_before_them(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: kernels)
    runner = ModelRunner(
        engine_config(tmp_path, device="cpu", dtype="float32", block_size=BLOCK_SIZE, num_blocks=64)
    )
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=3)
    prompt, drafts = list(range(1, 15)), [7, 9, 4]
    found = []
    for blocks, at_once in (([5, 2, 33], False), ([50, 9, 12], True)):
        rows = [HandSequence(prompt, blocks, params) for _ in drafts]
        runner.execute(make_batch([(rows[0], len(prompt))], BLOCK_SIZE))
        for count, row in enumerate(rows):
            row.output, row.num_computed = drafts[: count + 1], len(prompt) + count
        batches = [rows] if at_once else [[row] for row in rows]
        outputs = [runner.execute(make_batch([(row, 1) for row in batch], BLOCK_SIZE)) for batch in batches]
        found.append([entry for output in outputs for _, entry in sorted(output.logprobs.items())])
    for one, other in zip(*found, strict=True):
        assert one.top_ids == other.top_ids
        assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def test_exact_kernels_give_a_token_the_same_bits_however_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt at once and alone; in chunks, the last of them a decode step, beside another sequence."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    kernels = CudaKernels(num_sms=1, exact=True, prefill_shape=SMALL)
    monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: kernels)
    runner = ModelRunner(
        engine_config(tmp_path, device="cpu", dtype="float32", block_size=BLOCK_SIZE, num_blocks=64)
    )
    random = np.random.default_rng(2)
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=3)
    prompt, other_prompt = (random.integers(0, VOCAB_SIZE, n).tolist() for n in (20, 5))
    alone = HandSequence(prompt, [5, 2, 33], params)
    whole = runner.execute(make_batch([(alone, 20)], BLOCK_SIZE))
    chunked, other = HandSequence(prompt, [50, 9, 12], params), HandSequence(other_prompt, [1], params)
    for chunk, beside in ((12, 5), (7, 0), (1, 1)):
        steps = [(chunked, chunk)] + ([(other, beside)] if beside else [])
        output = runner.execute(make_batch(steps, BLOCK_SIZE))
        chunked.num_computed += chunk
        other.num_computed += beside
        other.output += output.token_ids[1:].tolist()
    pool = runner.kv_cache.pool
    assert torch.equal(pool[alone.blocks], pool[chunked.blocks])
    assert output.logprobs[0] == whole.logprobs[0]
