"""Quantised weights in the forms of checkpoints, drawn by a seed."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from splitserve.kernels.quantised import SUPER_BLOCK, QuantisedWeight


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weight(
    n: int, k: int, bits: int, group: int, zeros: bool, order: bool, halves: bool, seed: int
) -> QuantisedWeight:
    """Draw a weight in a checkpoint's form."""
    draw = torch.Generator().manual_seed(seed)
    groups = -(-k // group)
    columns = -(-k // 2) if bits == 4 else k
    scales = torch.rand(n, groups, generator=draw) / 16 + 0.01
    return QuantisedWeight(
        torch.randint(0, 256, (n, columns), dtype=torch.uint8, generator=draw),
        scales.half().float() if halves else scales,
        k,
        group,
        4 if bits == 4 else 8,
        torch.randint(0, 2**bits, (n, groups), generator=draw).float() if zeros else None,
        torch.randperm(k, generator=draw) if order else None,
    )


def random_float4(n: int, k: int, seed: int) -> QuantisedWeight:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=draw)
    return QuantisedWeight(
        codes, 2.0 ** torch.randint(-9, 3, (n, k // 32), generator=draw), k, 32, 4, float4=True
    )


def multiples_of_supers(n: int, k: int, bits: int, group: int, minimums: bool, seed: int) -> QuantisedWeight:
    draw = torch.Generator().manual_seed(seed)
    drawn = random_weight(n, k, bits, group, False, False, False, seed)
    supers = (torch.randn(n, k // SUPER_BLOCK, 1 + minimums, generator=draw) / 16).half().float()
    supers[0, 0] = 0  # as of a super-block of zeros
    multiples = torch.randint(-128, 128, (n, k // group, 1 + minimums), generator=draw)
    values = multiples * supers.repeat_interleave(SUPER_BLOCK // group, 1)
    own = values[..., 1].contiguous() if minimums else None
    return replace(drawn, scales=values[..., 0].contiguous(), minimums=own, supers=supers)


def assert_product(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """x is rounded to 16 bits beside its largest, the result to its type."""
    terms = x.float().abs().amax(1, keepdim=True) * weight.abs().sum(1)
    allowed = 2e-5 * terms + (1e-2 * found.float().abs() if found.dtype == torch.bfloat16 else 0)
    exact = F.linear(x.float(), weight, None if bias is None else bias.float())
    assert ((found.float() - exact).abs() <= allowed + 1e-30).all()
