"""A model's start: weights side by side, first steps of all sizes, and the error where something does not
fit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import engine_config
from support.models import make_checkpoint

from splitserve.engine import loaded_model
from splitserve.engine.cache.kv_cache import KVCache, KVCacheLayout
from splitserve.engine.errors import OutOfMemoryError
from splitserve.engine.model.decoder import DecoderModel
from splitserve.engine.model.decoder_layer import DecoderLayer
from splitserve.engine.model.layers import LayerLoader
from splitserve.engine.model.weights import Checkpoint
from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.engine.step.warm_up import many_seqs, run_first_steps
from splitserve.kernels.gpu.attention_tiles import padded_seqs
from splitserve.kernels.interface import DenseMlp
from splitserve.kernels.reference import TorchKernels

CPU = torch.device("cpu")


def no_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_layers_are_loaded_side_by_side_and_in_their_order(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2", num_hidden_layers=6)
    config = loaded_model.ModelConfig.from_folder(tmp_path)
    two_at_once = threading.Barrier(2, timeout=60)

    class Kernels(TorchKernels):
        def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
            if threading.current_thread().name.startswith("load-weights"):
                two_at_once.wait()  # another thread loads another layer meanwhile
            assert torch.is_inference_mode_enabled()
            return super().linear(weight, bias)

    with Checkpoint(tmp_path) as checkpoint, torch.inference_mode():
        plain = [
            DecoderLayer(
                config, i, LayerLoader(checkpoint, TorchKernels(), torch.float32, CPU), torch.ones(1)
            )
            for i in range(6)
        ]
        model = DecoderModel(
            config, LayerLoader(checkpoint, Kernels(), torch.float32, CPU, num_threads=2), 64
        )
        for layer, expected in zip(model._layers, plain, strict=True):
            assert layer._index == expected._index
            x = torch.randn(3, config.hidden_size)
            assert torch.equal(layer.parts.qkv(x), expected.parts.qkv(x))
            mlp, expected_mlp = layer.parts.mlp, expected.parts.mlp
            assert isinstance(mlp, DenseMlp)
            assert isinstance(expected_mlp, DenseMlp)
            assert torch.equal(mlp.down(torch.ones(1, 160)), expected_mlp.down(torch.ones(1, 160)))


def test_weights_that_do_not_fit_are_told_with_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama2", num_hidden_layers=1)
    monkeypatch.setattr(loaded_model, "DecoderModel", lambda *_: no_memory())
    with pytest.raises(
        OutOfMemoryError,
        match=r"weights do not fit on cpu, where \d+\.\d\d GiB were free .*--quantization fp8",
    ):
        ModelRunner(engine_config(tmp_path, "cpu", "float32", 8, 16))


@pytest.mark.parametrize("fail", [no_memory, None])
def test_a_first_step_of_each_size(fail: Callable[[], None] | None) -> None:
    ran: list[tuple[int, int]] = []

    def execute(batch: Batch) -> StepOutput:
        if fail is not None and batch.num_tokens == 30:
            fail()
        assert batch.block_tables.shape == (1, -(-int(batch.seq_lens[0]) // 8))
        ran.append((int(batch.positions[0]), batch.num_tokens))
        return StepOutput(batch.token_ids)

    if fail is None:
        run_first_steps(execute, [64, 30, 30, 20], 8)
        assert ran == [(0, 20), (0, 30), (0, 64), (20, 1), (20, 1), (20, 1)]
    else:
        with pytest.raises(OutOfMemoryError, match=r"a step of 30 tokens .*lower --kv-cache-gib"):
            run_first_steps(execute, [64, 30, 20], 8)


def test_every_size_of_kernels_has_a_first_step() -> None:
    for most in (64, 1024, 1025, 5000):
        sizes = {padded_seqs(count) for count in range(1, most + 1)}
        assert sizes <= {padded_seqs(1), *map(padded_seqs, many_seqs(most))}


def test_what_is_wrong_with_a_first_step_otherwise_stays_what_it_is() -> None:
    def execute(batch: Batch) -> StepOutput:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        run_first_steps(execute, [1], 8)


def test_the_size_of_a_pool_that_is_not_in_host_memory_is_known() -> None:
    layout = KVCacheLayout(2, 8, 2, 16, torch.bfloat16)
    cache = KVCache(layout, 5, torch.device("meta"))
    assert cache.num_bytes == 5 * 2 * 2 * 8 * 2 * 16 * 2
