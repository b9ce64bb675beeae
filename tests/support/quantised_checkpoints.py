"""Checkpoints of quantised weights, written by the public descriptions of their formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

Written = tuple[dict[str, Tensor], Tensor]
"""A linear layer's tensors by the ends of their names, and its weight dequantised, float32."""
GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def rewrite(
    folder: Path, model: PreTrainedModel, config: dict[str, Any], write: Callable[[Tensor], Written]
) -> PreTrainedModel:
    """Rewrite ``folder``, which was written from ``model``, with quantised layers; return the model with
    their dequantised weights."""
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            written, wide = write(tensors.pop(f"{name}.weight").float())
            tensors |= {f"{name}.{end}": tensor.contiguous() for end, tensor in written.items()}
            module.weight = torch.nn.Parameter(wide.clone(), requires_grad=False)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return model


def grouped(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [out, in], scales and zeros [out, groups], and the dequantised weight."""
    groups = weight.reshape(len(weight), -1, group)
    if symmetric:
        scales = groups.abs().amax(2) / (2 ** (bits - 1) - 1)
        zeros = torch.full_like(scales, 2.0 ** (bits - 1))
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = (high - low) / (2**bits - 1)
        zeros = (-low / scales).round()
    scales = scales.half().float()
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    wide = ((codes - zeros[..., None]) * scales[..., None]).reshape(weight.shape)
    return codes.reshape(weight.shape).to(torch.int32), scales, zeros.to(torch.int32), wide


def words(numbers: Tensor, bits: int) -> Tensor:
    """int32 [rows, numbers] -> int32 [rows, words], the first number in the lowest bits."""
    count = 32 // bits
    parts = numbers.reshape(len(numbers), -1, count).long()
    summed = sum(parts[..., i] << bits * i for i in range(count))
    assert isinstance(summed, Tensor)
    return (summed - (summed >= 2**31) * 2**32).to(torch.int32)


def packed(weight: Tensor, bits: int, group: int, symmetric: bool, act_order: bool) -> Written:
    """pack-quantized of compressed-tensors."""
    order = torch.randperm(weight.shape[1]) if act_order else torch.arange(weight.shape[1])
    codes, scales, zeros, wide = grouped(weight[:, order], bits, group or weight.shape[1], symmetric)
    back = order.argsort()
    found = {
        "weight_packed": words(codes[:, back], bits),
        "weight_scale": scales.to(torch.float16),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        found["weight_zero_point"] = words(zeros.T, bits).T
    if act_order:
        found["weight_g_idx"] = (torch.arange(len(order)) // group)[back].int()
    return found, wide[:, back]


def gptq(weight: Tensor, bits: int, symmetric: bool, act_order: bool, v2: bool) -> Written:
    order = torch.randperm(weight.shape[1]) if act_order else torch.arange(weight.shape[1])
    codes, scales, zeros, wide = grouped(weight[:, order], bits, GROUP, symmetric)
    back = order.argsort()
    stored = zeros if v2 else (zeros - 1) % 2**bits
    if not v2 and not symmetric:  # a zero of 0 has no stored form
        zeros = stored + 1
        wide = (codes.float() - zeros.repeat_interleave(GROUP, 1)) * scales.repeat_interleave(GROUP, 1)
    found = {
        "qweight": words(codes[:, back], bits).T,
        "qzeros": words(stored.T, bits),
        "scales": scales.T.half(),
        "g_idx": (torch.arange(len(order)) // GROUP)[back].int(),
    }
    return found, wide[:, back]


def awq(weight: Tensor) -> Written:
    codes, scales, zeros, wide = grouped(weight, 4, GROUP, symmetric=False)

    def mixed(rows: Tensor) -> Tensor:
        return words(rows.reshape(len(rows), -1, 8)[..., list(AWQ_ORDER)].flatten(1), 4)

    return {"qweight": mixed(codes.T), "qzeros": mixed(zeros.T), "scales": scales.T.half()}, wide


def int8(weight: Tensor) -> Written:
    codes, scales, _, wide = grouped(weight, 8, weight.shape[1], symmetric=True)
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}, wide


def float8(weight: Tensor, scales: Tensor, name: str, stored: Tensor) -> Written:
    """``scales``: as large as the weight; ``stored``: as the file has them."""
    codes = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, name: stored}, codes.float() * scales
