"""Checkpoints that llmcompressor and GPTQModel wrote (tools/tool_checkpoints.py) are the functions of the
weights that these tools dequantise themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.batches import HandSequence, hidden_states, make_batch
from support.quantised_models import BLOCK_SIZE, make_runner

from splitserve.engine.errors import ModelConfigError
from splitserve.engine.model.config import ModelConfig

pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
FOLDER = Path(__file__).parent / "checkpoints"
ROUNDED_INPUTS = {"w8a8": 5e-2}  # to int8
REFUSED = {"nvfp4a16": "format 'nvfp4-pack-quantized'", "mxfp4a16": "format 'mxfp4-pack-quantized'"}


@pytest.mark.parametrize(
    "name", sorted(path.name for path in FOLDER.iterdir() if (path / "model.safetensors").exists())
)
def test_a_tools_checkpoint(name: str, tried: Callable[[str, str, str], None]) -> None:
    tool = "GPTQModel" if name.startswith(("gptq", "awq")) else "llmcompressor"
    tried("llama3", "checkpoint", f"{name.upper().replace('_', ' ')} by {tool}")
    expected = load_file(FOLDER / name / "expected.safetensors")
    prompt = expected["prompt"].tolist()
    runner = make_runner(FOLDER / name)
    with torch.inference_mode():
        batch = make_batch([(HandSequence(prompt, [5, 2, 7]), len(prompt))], BLOCK_SIZE)
        logits = runner._model.logits(hidden_states(runner, batch))
    error = (logits - expected["logits"]).abs().max() / expected["logits"].abs().max()
    assert error < ROUNDED_INPUTS.get(name, 5e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_a_tools_checkpoint_is_refused(name: str) -> None:
    with pytest.raises(ModelConfigError, match=f"{REFUSED[name]} of compressed-tensors .* is not supported"):
        ModelConfig.from_folder(FOLDER / name)
