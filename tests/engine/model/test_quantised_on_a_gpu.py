"""Quantised checkpoints on a GPU, on one that is played."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.gguf_checkpoints import write_gguf
from support.gpu_runs import BLOCK_SIZE, NUM_BLOCKS, WAYS_TO_SAMPLE, generate, on_played_gpu
from support.models import make_checkpoint
from support.quantised_checkpoints import Written, awq, gptq, int8, rewrite, rewrite_experts_in_mxfp4

from splitserve.bench.kernels import triton_interpreter
from splitserve.engine import loaded_model
from splitserve.engine.errors import ModelConfigError
from splitserve.engine.gguf.folder import write_folder
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels.reference import TorchKernels

triton_interpreter.install()
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered")]

ROUNDED = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
CHECKPOINTS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Written]]] = {
    "GPTQ": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        partial(gptq, bits=4, symmetric=False, act_order=True, v2=False),
    ),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, awq),
    "W8A8": (
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {
                "one": {"targets": ["Linear"], "weights": ROUNDED, "input_activations": {"dynamic": True}}
            },
            "ignore": ["lm_head"],
        },
        int8,
    ),
}


def runner_on(device: str, folder: Path) -> ModelRunner:
    return ModelRunner(engine_config(folder, device, "float32", BLOCK_SIZE, NUM_BLOCKS, max_model_len=40))


@pytest.mark.parametrize(
    ("family", "form"), [*(("glm4", form) for form in CHECKPOINTS), ("mixtral", "AWQ"), ("gpt_oss", "MXFP4")]
)
def test_a_quantised_checkpoint_runs_as_in_torch(
    family: str,
    form: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tried: Callable[[str, str, str], None],
) -> None:
    """Its tensors are unpacked on the GPU; no step waits for it."""
    tried(family, "gpu", form)
    model = make_checkpoint(tmp_path, family, num_hidden_layers=1)
    if form == "MXFP4":
        rewrite_experts_in_mxfp4(tmp_path, model)
    else:
        rewrite(tmp_path, model, *CHECKPOINTS[form])
    monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: TorchKernels())
    expected, _ = generate(runner_on("cpu", tmp_path))
    with on_played_gpu(monkeypatch) as gpu:
        found, _ = generate(runner_on("cuda", tmp_path), gpu)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()


def test_a_gguf_file_runs_as_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the worker's refusal, which stands: its table of vectors is dequantised when it loads."""
    monkeypatch.setattr(loaded_model, "check_formats", lambda *_: None)
    made, out = tmp_path / "made", tmp_path / "out"
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    model = make_checkpoint(made, "llama2", num_hidden_layers=1, **sizes)
    write_gguf(made / "a.gguf", model, "llama", lambda name: "Q6_K" if "attn_v" in name else "Q4_K")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (made / name).unlink()
    out.mkdir()
    write_folder(made / "a.gguf", out)
    batch = make_batch([(HandSequence([5, 7, 9], [2], WAYS_TO_SAMPLE[1]), 3)], BLOCK_SIZE)
    monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: TorchKernels())
    expected = runner_on("cpu", out).execute(batch)
    with on_played_gpu(monkeypatch):
        found = runner_on("cuda", out).execute(batch)
    assert found.token_ids.tolist() == expected.token_ids.tolist()


def test_weights_in_groups_that_no_gpu_kernel_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [32, 24]}
    make_checkpoint(tmp_path, "llama3", num_hidden_layers=1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    with on_played_gpu(monkeypatch), pytest.raises(ModelConfigError, match="of which 24 share a scale"):
        ModelRunner(engine_config(tmp_path, "cuda", num_blocks=NUM_BLOCKS))
