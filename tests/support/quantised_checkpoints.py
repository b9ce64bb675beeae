"""Checkpoints of quantised weights, written by the public descriptions of their formats."""

from __future__ import annotations

import json
import re
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
SIDES = (32, 32)
LEFT_OUT = ("lm_head", "weights_proj", "shared_expert_gate", "in_proj_ba", "in_proj_b", "in_proj_a")
EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<i>\d+)\.(?P<matrix>\w+)\.weight")
OF_MODEL = {"block_sparse_moe": "mlp", "backbone": "model"}
"""Parts of tensors' names, and as transformers' modules have them."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def rewrite(
    folder: Path, model: PreTrainedModel, config: dict[str, Any], write: Callable[[Tensor], Written]
) -> PreTrainedModel:
    """Rewrite ``folder``, which was written from ``model``, with quantised layers and experts; return the
    model with their dequantised weights."""
    tensors = load_file(folder / "model.safetensors")

    def rewritten(name: str) -> Tensor:
        written, wide = write(tensors.pop(f"{name}.weight").float())
        tensors.update({f"{name}.{end}": tensor.contiguous() for end, tensor in written.items()})
        return wide.clone()

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(LEFT_OUT):
            stored = name if f"{name}.weight" in tensors else name.replace("model.", "backbone.", 1)
            module.weight = torch.nn.Parameter(rewritten(stored), requires_grad=False)
    for name in sorted(tensors):
        of_expert = EXPERT.fullmatch(name)
        if of_expert is not None:
            experts, i = (
                model.get_submodule(
                    re.sub("|".join(OF_MODEL), lambda found: OF_MODEL[found[0]], of_expert["experts"])
                ),
                int(of_expert["i"]),
            )
            inputs = experts.up_proj if hasattr(experts, "up_proj") else experts.gate_up_proj
            assert isinstance(inputs, torch.nn.Parameter)
            assert isinstance(experts.down_proj, torch.nn.Parameter)
            *gates, up = inputs.data[i].split(experts.down_proj.shape[2])
            gate = gates[0] if gates else None
            matrix = {"gate_proj": gate, "w1": gate, "up_proj": up, "w3": up}.get(of_expert["matrix"])
            (experts.down_proj.data[i] if matrix is None else matrix).copy_(
                rewritten(name.removesuffix(".weight"))
            )
    _save(folder, tensors, config)
    return model


def _save(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))


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


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [..., groups, 16] and scales [..., groups] of a weight [..., out, in], and it dequantised."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor().int() - 2  # the largest number is 1.5 * 2^2
    scales = 2.0 ** exponents[..., None]
    codes = ((groups / scales).abs()[..., None] - numbers).abs().argmin(-1)
    wide = (numbers[codes] * scales).copysign(groups).flatten(-2)
    codes = (codes + 8 * groups.signbit()).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8), wide


def rewrite_experts_in_mxfp4(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    """As ``rewrite``, of a gpt-oss model: its experts."""
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales, wide = mxfp4(tensors.pop(name).float().transpose(1, 2))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.data = wide.transpose(1, 2).contiguous()
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _save(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": left_out})
    return model


def rewrite_in_float8(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    """As ``rewrite``, of a model with all experts in one tensor, as Mistral 4 is published: a scale for each
    matrix, and for each expert's; and scales of inputs, which are not used."""

    def by_matrix(weight: Tensor) -> Written:
        scale = (weight.abs().max() / 448).bfloat16().float()
        return float8(weight, scale, "weight_scale_inv", scale.bfloat16())

    left_out = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    config = {
        "quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None,
        "modules_to_not_convert": left_out,
    }  # fmt: skip
    rewrite(folder, model, config, by_matrix)
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            continue
        written, wide = zip(*map(by_matrix, parameter.data.float()), strict=True)
        parameter.data = torch.stack(wide)
        assert name in tensors
        tensors |= {
            name: torch.stack([own["weight"] for own in written]),
            f"{name}_scale_inv": torch.stack([own["weight_scale_inv"] for own in written])[:, None, None],
            f"{name}_activation_scale": torch.full((len(wide),), 0.5, dtype=torch.bfloat16),
        }
    _save(folder, tensors, config)
    return model


def float8(weight: Tensor, scales: Tensor, name: str, stored: Tensor) -> Written:
    """``scales``: as large as the weight; ``stored``: as the file has them."""
    codes = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, name: stored}, codes.float() * scales


def by_block(weight: Tensor) -> Written:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % SIDES[1], 0, -rows % SIDES[0]))
    blocks = padded.reshape(padded.shape[0] // SIDES[0], SIDES[0], -1, SIDES[1])
    scales = blocks.abs().amax((1, 3)) / 448
    wide = scales.repeat_interleave(SIDES[0], 0).repeat_interleave(SIDES[1], 1)[:rows, :columns]
    return float8(weight, wide, "weight_scale_inv", scales)
