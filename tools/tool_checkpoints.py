"""Make the tiny checkpoints of tests/engine/model/checkpoints by the tools that people quantise with.

    pip install torch==2.13.0 llmcompressor==0.14.0.1 transformers==5.17.0   # each tool in a venv of its own
    PYTHONPATH=tests python tools/tool_checkpoints.py llmcompressor FOLDER
    pip install torch==2.13.0 gptqmodel==7.6.0 transformers==5.24.0
    GPTQMODEL_CPU_WORKERS=2 PYTHONPATH=tests python tools/tool_checkpoints.py gptqmodel FOLDER

Beside each checkpoint lies ``expected.safetensors``: a prompt, and its logits by transformers in float32 with
the weights that the tool itself dequantises.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.models import make_checkpoint
from transformers import LlamaForCausalLM

SIZES: dict[str, Any] = {
    "num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KEPT = ("config.json", "model.safetensors", "expected.safetensors")
NUM_TOKENS, NUM_SAMPLES, GROUP = 16, 32, 16
PRESETS = ("W8A8", "FP8_DYNAMIC", "FP8", "FP8_BLOCK", "NVFP4A16", "MXFP4A16")
GROUPED = {
    "W4A16": {"num_bits": 4, "group_size": GROUP},
    "W4A16_ASYM": {"num_bits": 4, "group_size": GROUP, "symmetric": False},
    "W4A16_ACTORDER": {"num_bits": 4, "group_size": GROUP, "actorder": "weight"},
    "W8A16": {"num_bits": 8, "group_size": GROUP},
}


def samples() -> list[list[int]]:
    drawn = torch.randint(
        3, SIZES["vocab_size"], (NUM_SAMPLES, 64), generator=torch.Generator().manual_seed(5)
    )
    return [row.tolist() for row in drawn]


def expect(folder: Path, wide: Path, weights: dict[str, torch.Tensor]) -> None:
    """``weights``: the dequantised ones, by module."""
    dequantised = LlamaForCausalLM.from_pretrained(wide, dtype=torch.float32)
    assert len(weights) == 7, sorted(weights)
    for path, weight in weights.items():
        dequantised.get_submodule(path).weight.data.copy_(weight)
    prompt = torch.tensor([samples()[0][:NUM_TOKENS]])
    with torch.inference_mode():
        logits = dequantised(prompt).logits[0]
    save_file({"prompt": prompt[0], "logits": logits.contiguous()}, folder / "expected.safetensors")
    for file in folder.iterdir():
        if file.name not in KEPT:
            file.unlink()


def by_llmcompressor(wide: Path, out: Path) -> None:
    from compressed_tensors.compressors import decompress_module
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    data = Dataset.from_dict({"input_ids": samples(), "attention_mask": [[1] * 64] * NUM_SAMPLES})
    for name in (*PRESETS, *GROUPED):
        if name in PRESETS:
            modifier = QuantizationModifier(targets="Linear", scheme=name, ignore=["lm_head"])
        else:
            weights = QuantizationArgs(type="int", strategy="group", **{"symmetric": True, **GROUPED[name]})
            scheme = QuantizationScheme(targets=["Linear"], weights=weights)
            kind = GPTQModifier if "actorder" in GROUPED[name] else QuantizationModifier
            modifier = kind(config_groups={"group_0": scheme}, ignore=["lm_head"])
        folder = out / name.lower()
        calibration = {"dataset": data, "num_calibration_samples": NUM_SAMPLES, "max_seq_length": 64}
        needed = name in ("FP8", "W4A16_ACTORDER")
        oneshot(model=str(wide), recipe=modifier, output_dir=str(folder), **(calibration if needed else {}))
        if "FP4" in name:
            shutil.copy(folder / "config.json", folder / "kept")  # is refused by its config.json
            for file in folder.iterdir():
                if file.name != "config.json":
                    file.unlink()
            continue
        tensors = load_file(folder / "model.safetensors")
        precise = out / "precise"
        shutil.copytree(folder, precise)
        save_file(
            {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in tensors.items()},
            precise / "model.safetensors", metadata={"format": "pt"},
        )  # fmt: skip
        model, weights = LlamaForCausalLM.from_pretrained(precise, dtype=torch.float32), {}
        for path, module in model.named_modules():
            if hasattr(module, "quantization_scheme"):
                decompress_module(module)
                weights[path] = module.weight
        shutil.rmtree(precise)
        expect(folder, wide, weights)


def by_gptqmodel(wide: Path, out: Path) -> None:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    data = [{"input_ids": ids, "attention_mask": [1] * 64} for ids in samples()]
    kinds = {
        "gptq": {},
        "gptq_actorder": {"desc_act": True},
        "gptq_asym": {"sym": False},
        "gptq_8": {"bits": 8},
    }
    for name, changes in kinds.items():
        folder = out / name
        config = QuantizeConfig(**{"bits": 4, "group_size": GROUP, "desc_act": False, **changes})
        model = GPTQModel.load(str(wide), config, device="cpu")
        model.quantize(data, batch_size=8)
        model.save(str(folder))
        loaded = GPTQModel.load(str(folder), device="cpu", backend=BACKEND.TORCH)
        weights, stored = {}, load_file(folder / "model.safetensors")
        for path, module in loaded.model.named_modules():
            if hasattr(module, "dequantize_weight"):
                module.scales = stored[f"{path}.scales"].float()  # loading made them bfloat16
                weights[path] = module.dequantize_weight().T
        expect(folder, wide, weights)


def main() -> None:
    tool, out = sys.argv[1], Path(sys.argv[2])
    wide = out / "wide"
    make_checkpoint(wide, "llama3", dtype=torch.bfloat16, **SIZES)
    {"llmcompressor": by_llmcompressor, "gptqmodel": by_gptqmodel}[tool](wide, out)
    shutil.rmtree(wide)


if __name__ == "__main__":
    main()
