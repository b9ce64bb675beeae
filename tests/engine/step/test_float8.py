"""A KV cache of 8-bit codes answers nearly as a wide one, in exact mode always with the same bits; float8
options are refused, with a sentence, where they cannot work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.families import VOCAB_SIZE
from support.models import make_checkpoint

from splitserve.bench.kernels import triton_interpreter
from splitserve.engine import loaded_model
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels import select
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu.attention_tiles import TileShape
from splitserve.kernels.reference import TorchKernels
from splitserve.transport.messages.messages import SamplingParams

triton_interpreter.install()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
BLOCK_SIZE = 8
PARAMS = SamplingParams(max_tokens=9, temperature=0.0, logprobs=2)


def make_runner(folder: Path, **changes: Any) -> ModelRunner:
    config: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "num_blocks": 16,
        "max_model_len": 64,
        **changes,
    }
    return ModelRunner(engine_config(folder, **config))


def answer(runner: ModelRunner, chunks: tuple[int, ...] = (13, 7, 1, 1)) -> tuple[list[int], list[float]]:
    """A prompt of 20 tokens in chunks, then decode steps: tokens, and their logprobs."""
    sequence = HandSequence(
        np.random.default_rng(1).integers(0, VOCAB_SIZE, 20).tolist(), [9, 3, 5, 4], PARAMS
    )
    logprobs = []
    for count in chunks:
        output = runner.execute(make_batch([(sequence, count)], BLOCK_SIZE))
        sequence.num_computed += count
        if 0 in output.logprobs:
            sequence.output.append(int(output.token_ids[0]))
            logprobs.append(output.logprobs[0].logprob)
    return sequence.output, logprobs


def test_an_int8_cache_answers_nearly_as_a_wide_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=2)
    wide, narrow = make_runner(tmp_path), make_runner(tmp_path, kv_dtype="int8")
    head_dim = wide.kv_cache.layout.head_dim
    ratio = narrow.kv_cache.layout.block_bytes / wide.kv_cache.layout.block_bytes
    assert ratio == (head_dim + 4) / (4 * head_dim)
    assert narrow.loaded.kv_name != wide.loaded.kv_name
    (tokens, logprobs), (expected, expected_logprobs) = answer(narrow), answer(wide)
    assert tokens == expected
    assert logprobs == pytest.approx(expected_logprobs, abs=0.15)
    assert logprobs != expected_logprobs


def test_a_float8_cache_answers_nearly_as_a_wide_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=2)
    wide, narrow = make_runner(tmp_path), make_runner(tmp_path, kv_dtype="fp8")
    assert narrow.kv_cache.layout.block_bytes * 4 == wide.kv_cache.layout.block_bytes
    assert narrow.loaded.kv_name != wide.loaded.kv_name  # the two do not mix
    (tokens, logprobs), (expected, expected_logprobs) = answer(narrow), answer(wide)
    assert tokens == expected
    assert logprobs != expected_logprobs
    stored, exact = (
        runner.kv_cache.pool[[9, 3], 0].float() for runner in (narrow, wide)
    )  # before any attention: the same up to rounding
    assert torch.allclose(stored, exact, rtol=1 / 16 + 1e-5, atol=2**-10)  # three bits of mantissa


def test_the_gpu_kernels_fill_and_read_it_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    expected_runner = make_runner(tmp_path, kv_dtype="fp8")
    expected = answer(expected_runner)
    monkeypatch.setattr(
        loaded_model, "select_kernels", lambda *_, **__: CudaKernels(1, prefill_shape=TileShape(16, 32, 4, 3))
    )
    runner = make_runner(tmp_path, kv_dtype="fp8")
    tokens, logprobs = answer(runner)
    assert tokens == expected[0]
    assert logprobs == pytest.approx(
        expected[1], abs=0.05
    )  # a value on the edge between two of float8's may fall either way
    same = (runner.kv_cache.pool.float() == expected_runner.kv_cache.pool.float()).float().mean()
    assert same > 0.99


@pytest.mark.parametrize("name", ["k_scale", "k_proj.k_scale"])  # ModelOpt's has the second
def test_scales_come_from_the_checkpoint(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=1)
    plain = make_runner(tmp_path, kv_dtype="fp8")
    weights = load_file(tmp_path / "model.safetensors")
    scale = {f"model.layers.0.self_attn.{name}": torch.tensor(4.0)}
    save_file({**weights, **scale}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    scaled = make_runner(tmp_path, kv_dtype="fp8")
    answer(plain)
    answer(scaled)
    keys, scaled_keys = (runner.kv_cache.pool[9, 0, 0].float() for runner in (plain, scaled))
    assert torch.allclose(scaled_keys * 4, keys, rtol=0.15, atol=0.02)
    assert scaled.loaded.kv_name != plain.loaded.kv_name
    make_runner(tmp_path)  # a wide cache has no use for it, and loads all the same


def test_kernels_that_lay_keys_out_otherwise_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=1)
    cases: list[dict[str, Any]] = [{"block_size": 16}, {"block_size": 16, "kv_dtype": "int8"}, {}]
    native = [make_runner(tmp_path, **case).loaded.kv_name for case in cases]
    monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: TorchKernels())
    plain = [make_runner(tmp_path, **case).loaded.kv_name for case in cases]
    assert native == [f"{plain[0]}, keys by 16", f"{plain[1]}, keys by 16", plain[2]]


def test_quantized_workers_do_not_mix_with_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=1)
    plain = make_runner(tmp_path)
    monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: CudaKernels(1))
    quantised = make_runner(tmp_path, quantization="fp8")
    assert (quantised.loaded.kv_name != plain.loaded.kv_name, quantised.loaded.revision) == (
        True,
        plain.loaded.revision,
    )


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_exact_mode_chunks_and_threads_do_not_matter(tmp_path: Path, kv_dtype: str, dtype: str) -> None:
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=2)
    answers = [
        answer(make_runner(tmp_path, kv_dtype=kv_dtype, dtype=dtype, exact=True, threads=threads), chunks)
        for threads, chunks in ((1, (13, 7, 1, 1)), (2, (20, 1, 1)), (1, (1, 9, 10, 1, 1)))
    ]
    assert answers[0] == answers[1] == answers[2]
    wide = answer(make_runner(tmp_path, dtype=dtype, exact=True))
    assert answers[0] != wide


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_a_latent_cache_may_be_narrow_too(tmp_path: Path, kv_dtype: str) -> None:
    make_checkpoint(tmp_path, "deepseek2")
    wide, narrow = make_runner(tmp_path), make_runner(tmp_path, kv_dtype=kv_dtype)
    assert narrow.kv_cache.layout.block_bytes < 0.4 * wide.kv_cache.layout.block_bytes
    assert answer(narrow)[1] == pytest.approx(answer(wide)[1], abs=0.6)


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"kv_dtype": "fp8"}, {"fp8_weights": True}])
def test_a_gpu_before_ada_is_told_so(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    capability: Callable[[object], tuple[int, int]] = lambda device: (8, 0)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(select.UnsuitableKernelsError, match="NVIDIA A100 has no float8 instructions"):
        select.select_kernels(torch.device("cuda"), 1, **options)


def test_an_int8_cache_on_a_gpu_is_refused() -> None:
    with pytest.raises(select.UnsuitableKernelsError, match="CPUs only: use fp8 or auto on cuda"):
        select.select_kernels(torch.device("cuda"), 1, kv_dtype="int8")
