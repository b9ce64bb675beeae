"""A rank's part of a weight is those rows or columns of the whole, in the form of the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.quantised_weights import assert_product, multiples_of_supers, randn, random_float4, random_weight
from torch import Tensor

from splitserve.kernels.quantised import (
    SUPER_BLOCK,
    QuantisedWeight,
    quantise,
    selected_columns,
    selected_rows,
)

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
KINDS = {
    "int8 at load": quantise(randn(21, 300, seed=0), "int8"),
    "int4 at load": quantise(randn(21, 300, seed=1), "int4"),
    "float8 at load": quantise(randn(21, 300, seed=2), "fp8"),
    "inputs rounded": replace(quantise(randn(21, 300, seed=2), "int8"), rounds_x=True),
    "4 bits with zeros": random_weight(21, 320, 4, 64, True, False, True, seed=3),
    "8 bits with zeros": random_weight(21, 320, 8, 64, True, False, False, seed=4),
    "minimums": replace(random_weight(21, 256, 8, 32, False, False, False, 5), minimums=randn(21, 8, seed=6)),
    "super-blocks": multiples_of_supers(21, 1024, 4, 32, True, seed=7),
    "super-blocks without minimums": multiples_of_supers(21, 768, 8, 16, False, seed=8),
    "float4": random_float4(21, 320, seed=9),
    "odd groups": random_weight(21, 120, 8, 24, True, False, False, seed=10),
    "a group wider than the weight": random_weight(21, 100, 4, 128, True, False, False, seed=11),
    "an odd number of inputs": random_weight(21, 101, 4, 32, True, False, False, seed=12),
}
"""Weights of all kinds, with 21 outputs."""


def cuts_of(weight: QuantisedWeight) -> list[int]:
    """The places at which the columns can be cut, ends included."""
    one_group = weight.scales.shape[1] == 1
    step = SUPER_BLOCK if weight.supers is not None else 8 // weight.bits if one_group else weight.group_size
    return [*range(0, weight.in_features, step), weight.in_features]


@pytest.mark.parametrize("kind", KINDS)
def test_some_inputs_alone_are_those_columns(native: native_cpu.NativeCpuKernels, kind: str) -> None:
    """In the same form, so that kernels multiply by them as by the whole."""
    weight, cuts = KINDS[kind], cuts_of(KINDS[kind])
    middle = cuts[len(cuts) // 2]
    parts = {(0, middle), (middle, cuts[-1]), (cuts[1], cuts[-2]), (cuts[-2], cuts[-1])}
    if weight.supers is None:
        parts.add((4, 8))  # within a group
    for first, last in sorted(part for part in parts if part[0] < part[1]):
        part = selected_columns(weight, first, last)
        assert isinstance(part, QuantisedWeight)
        expected = weight.dequantised()[:, first:last]
        assert torch.equal(part.dequantised(), expected)
        assert torch.equal(part.rows(torch.tensor([20, 3])).dequantised(), expected[[20, 3]])
        x = (randn(5, last - first, seed=first) * 40).round().clamp(-127, 127)
        x[:, 0] = 127  # so that these are what x is rounded to
        assert_product(native.linear(part, None)(x), x, expected)
    plain = weight.dequantised()
    columns = selected_columns(plain, 1, 5)
    assert isinstance(columns, Tensor)
    assert torch.equal(columns, plain[:, 1:5])
    assert torch.equal(weight.columns(0, weight.in_features).dequantised(), plain)


@pytest.mark.parametrize(
    ("kind", "first", "last", "what"),
    [
        ("4 bits with zeros", 32, 128, "columns 32 to 128 of 320 cannot be cut out of groups of 64"),
        ("8 bits with zeros", 0, 100, "columns 0 to 100 of 320 cannot be cut out of groups of 64"),
        ("float4", 16, 64, "columns 16 to 64 of 320 cannot be cut out of groups of 32"),
        ("a group wider than the weight", 3, 8, "columns 3 to 8 of 100 .* out of pairs of 4-bit codes of 2"),
        ("a group wider than the weight", 0, 7, "pairs of 4-bit codes"),
        ("super-blocks", 128, 512, "columns 128 to 512 of 1024 cannot be cut out of super-blocks of 256"),
        ("super-blocks", 0, 32, "super-blocks"),
    ],
)
def test_columns_are_not_cut_out_of_what_belongs_together(
    kind: str, first: int, last: int, what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        KINDS[kind].columns(first, last)


def test_columns_in_an_order_of_their_own_are_not_cut() -> None:
    with pytest.raises(ValueError, match=r"act-order \(desc_act\) cannot be cut"):
        random_weight(4, 64, 4, 32, False, True, False, seed=0).columns(0, 32)


def test_selected_rows_keep_their_parts() -> None:
    """Any of a part's rows, in any order within it; a part without rows is left out."""
    parts = [KINDS["int8 at load"], randn(8, 300, seed=5), KINDS["int4 at load"]]
    whole = torch.cat([part if isinstance(part, Tensor) else part.dequantised() for part in parts])
    for rows, kept in (([3, 0, 28, 21, 29, 49], 3), ([20, 30], 2), ([22], 1), (range(50), 3)):
        selected = selected_rows(parts, torch.tensor([*rows]))
        wide = [part if isinstance(part, Tensor) else part.dequantised() for part in selected]
        assert len(selected) == kept
        assert torch.equal(torch.cat(wide), whole[[*rows]])
    for wrong in ([22, 3], [50], [0, 21, 1]):
        with pytest.raises(AssertionError):
            selected_rows(parts, torch.tensor(wrong))
