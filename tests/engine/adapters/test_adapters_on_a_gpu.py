"""Adapters on GPUs that are played: steps in graphs and without give a CPU's tokens, and wait for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine.ranks.played_nccl import PlayedNccl
from support.adapters import save_adapter
from support.engines import engine_config
from support.gpu_runs import BLOCK_SIZE, NUM_BLOCKS, generate, load, on_played_gpu
from support.models import make_checkpoint
from support.played_gpu import OnGpu

from splitserve.bench.kernels import triton_interpreter
from splitserve.engine import loaded_model
from splitserve.engine.adapters.files import AdapterFile, read_adapter
from splitserve.engine.adapters.resident import ResidentAdapters
from splitserve.engine.ranks import threads
from splitserve.engine.ranks.nccl import Communicators
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels.gpu import low_rank
from splitserve.kernels.reference import TorchKernels

triton_interpreter.install()
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered")]


def placed(resident: ResidentAdapters | None, files: list[AdapterFile]) -> None:
    assert resident is not None
    for slot, file in enumerate(files):
        resident.check(file)
        resident.put(slot, file)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_gpu_gives_a_cpus_tokens(num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that are filled anew are seen by the graphs that were recorded before."""
    reference = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    files = []
    for seed in (1, 2, 3):
        save_adapter(reference, tmp_path / "adapters" / str(seed), seed).unload()
        files.append(read_adapter(tmp_path / "adapters" / str(seed)))
    settings = {"lora_folder": tmp_path / "adapters", "max_loras": 2, "max_lora_rank": 4}
    a, b, c = (file.content for file in files)
    asked = [((a, b), files[:2]), ((c, ""), [files[2], files[0]])][: 3 - num_gpus]
    expected = []
    with monkeypatch.context() as patched:
        patched.setattr(loaded_model, "select_kernels", lambda *_, **__: TorchKernels())
        config = engine_config(
            tmp_path, "cpu", "float32", BLOCK_SIZE, NUM_BLOCKS, max_model_len=40, **settings
        )
        runner = ModelRunner(config)
        for adapters, there in asked:
            placed(ResidentAdapters(runner.ranks), there)
            expected.append([step.token_ids.tolist() for step in generate(runner, None, adapters)[0]])
    assert len({str(tokens) for tokens in expected}) == len(asked)
    library = PlayedNccl(num_gpus)
    monkeypatch.setattr(threads, "Communicators", lambda size: Communicators(size, library, lambda: 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(low_rank, "ROWS", 4)  # a program for each: few, in the interpreter
    with on_played_gpu(monkeypatch) as gpu:
        model = load(tmp_path, num_gpus=num_gpus, **settings)
        assert isinstance(model.runner, ModelRunner)
        assert isinstance(model.runner.kv_cache.pool, OnGpu)
        for (adapters, there), tokens in zip(asked, expected, strict=True):
            placed(model.adapters, there)
            found = generate(model.runner, gpu, adapters)[0]
            assert [step.token_ids.tolist() for step in found] == tokens, adapters
