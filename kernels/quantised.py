"""Quantised weights: what loading produces, ``Kernels.linear`` takes; and how a weight is quantised at load.

    w[n][k] = scale[n][g] * (code[n][k] - zero[n][g]) - minimum[n][g],  g = k // group_size

int8 has a scale for each row, int4 for each 32 inputs of a row, float8 for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Scheme = Literal["int8", "int4", "fp8"]
INT4_GROUP = 32
SUPER_BLOCK = 256
LARGEST = {"int8": 127.0, "int4": 8.0, "fp8": 448.0}
FLOAT4 = tuple(sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""The numbers of e2m1, by their codes."""
INT4_SHRINKS = (1.0, 0.94, 0.88)
"""Scales that are tried for a group, times the largest: clipping its extremes may lose less than it gains."""
ROWS_AT_ONCE = 64  # that are quantised: they stay in a core's cache


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A matrix [out_features, in_features] in codes and scales.

    codes      uint8 [out, in]; of 4 bits [out, in / 2 rounded up], the even input low; or float8_e4m3fn
    float4     codes of 4 bits are floats (e2m1), and scales powers of 2
    scales     float32 [out, groups]
    zeros      float32 [out, groups]; None: half the range of whole numbers, 0 of float8
    order      int64 [in]: the input that each column multiplies (GPTQ's act-order); None: its own
    rounds_x   inputs are rounded to int8, each row with a scale
    minimums   float32 [out, groups]; zeros are 0 then, where None
    supers     float32 [out, super-blocks, 1 or 2], held exactly by float16: the scales (and minimums) of
               each SUPER_BLOCK inputs are multiples of these, from -128 to 127
    """

    codes: Tensor
    scales: Tensor
    in_features: int
    group_size: int
    bits: Literal[4, 8]
    zeros: Tensor | None = None
    order: Tensor | None = None
    rounds_x: bool = False
    minimums: Tensor | None = None
    supers: Tensor | None = None
    float4: bool = False

    @property
    def offsets(self) -> Tensor | None:
        """What is subtracted from scale * code, where it is not half the range; float32 [out, groups]."""
        if self.zeros is None:
            return self.minimums
        offsets = self.scales * self.zeros
        return offsets if self.minimums is None else offsets + self.minimums

    @property
    def is_float8(self) -> bool:
        return self.codes.dtype == torch.float8_e4m3fn

    @property
    def out_features(self) -> int:
        return len(self.codes)

    def __len__(self) -> int:
        return self.out_features

    def rows(self, rows: Tensor | slice) -> QuantisedWeight:
        """The outputs ``rows`` (int64) alone, in that order."""
        codes = self.codes.view(torch.uint8)[rows].view(self.codes.dtype)
        zeros, minimums, supers = (
            None if tensor is None else tensor[rows] for tensor in (self.zeros, self.minimums, self.supers)
        )
        return replace(
            self, codes=codes, scales=self.scales[rows], zeros=zeros, minimums=minimums, supers=supers
        )

    def columns(self, first: int, last: int) -> QuantisedWeight:
        """The inputs [first, last) alone. Raises ValueError where these codes cannot be cut there."""
        if self.order is not None:
            raise ValueError("the columns of a weight with act-order (desc_act) cannot be cut")
        group, pair = self.group_size, 8 // self.bits
        units = {"groups": group, "pairs of 4-bit codes": pair}
        if self.supers is not None:
            units["super-blocks"] = SUPER_BLOCK
        for name, size in units.items():
            within = name == "groups" and first // size == (last - 1) // size
            if not within and (first % size or (last % size and last < self.in_features)):
                cut = f"columns {first} to {last} of {self.in_features}"
                raise ValueError(f"{cut} cannot be cut out of {name} of {size}")

        def part(of: Tensor, size: int) -> Tensor:
            return of[:, first // size : -(-last // size)].contiguous()

        zeros, minimums = (None if of is None else part(of, group) for of in (self.zeros, self.minimums))
        supers = None if self.supers is None else part(self.supers, SUPER_BLOCK)
        return replace(
            self, codes=part(self.codes, pair), scales=part(self.scales, group), in_features=last - first,
            zeros=zeros, minimums=minimums, supers=supers,
        )  # fmt: skip

    def dequantised(self) -> Tensor:
        """float32 [out, in]: what every kernel is tested against."""
        if self.bits == 4:
            codes = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)[:, : self.in_features]
        else:
            codes = self.codes

        def wide(groups: Tensor) -> Tensor:
            return groups.repeat_interleave(self.group_size, 1)[:, : self.in_features]

        if self.float4:
            codes = torch.tensor(FLOAT4, device=codes.device)[codes.int()]
        signed = self.is_float8 or self.float4 or self.minimums is not None
        zeros = 0.0 if signed else 2.0 ** (self.bits - 1)
        weight = wide(self.scales) * (codes.float() - (zeros if self.zeros is None else wide(self.zeros)))
        if self.minimums is not None:
            weight -= wide(self.minimums)
        if self.order is None:
            return weight
        restored = torch.empty_like(weight)
        restored[:, self.order] = weight
        return restored


Weight = Tensor | QuantisedWeight


def parts_of(weight: Weight | Sequence[Weight]) -> Sequence[Weight]:
    """One or several weights that become one."""
    return [weight] if isinstance(weight, Weight) else weight


def selected_rows(parts: Sequence[Weight], rows: Tensor) -> list[Weight]:
    """The outputs ``rows`` (int64) of several weights side by side: those of the first part, then those of
    the second. Parts without any of these are left out."""
    selected: list[Weight] = []
    start = taken = 0
    for part in parts:
        own = rows[(rows >= start) & (rows < start + len(part))]
        assert torch.equal(own, rows[taken : taken + len(own)])
        if len(own):
            selected.append(part[own - start] if isinstance(part, Tensor) else part.rows(own - start))
        start, taken = start + len(part), taken + len(own)
    assert taken == len(rows)
    return selected


def selected_columns(weight: Weight, first: int, last: int) -> Weight:
    """See ``QuantisedWeight.columns``."""
    return weight[:, first:last].contiguous() if isinstance(weight, Tensor) else weight.columns(first, last)


def rounded_rows(x: Tensor) -> Tensor:
    """float32: each row rounded to int8 times a scale of its own."""
    wide = x.float()
    scales = wide.abs().amax(1, keepdim=True) / LARGEST["int8"]
    return (wide / scales.where(scales > 0, 1)).round() * scales


def quantise(weight: Tensor, scheme: Scheme) -> QuantisedWeight:
    """A matrix of any float type, some rows at a time."""
    quantise_rows = {"int8": _int8, "int4": _int4, "fp8": _float8}[scheme]
    parts = [quantise_rows(rows.float()) for rows in torch.split(weight, ROWS_AT_ONCE)]
    codes, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    group_size = INT4_GROUP if scheme == "int4" else weight.shape[1]
    return QuantisedWeight(codes, scales, weight.shape[1], group_size, 4 if scheme == "int4" else 8)


def joined_weight(parts: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """Several with the same inputs as one, their outputs side by side; None where their forms differ."""
    first = parts[0]
    alike = all(
        _form(part) == _form(first) and (part.order is first.order or _equal(part.order, first.order))
        for part in parts
    )
    if not alike:
        return None
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(first.codes.dtype)
    return replace(
        first,
        codes=codes,
        scales=torch.cat([part.scales for part in parts]),
        zeros=_cat([part.zeros for part in parts]),
        minimums=_cat([part.minimums for part in parts]),
        supers=_cat([part.supers for part in parts]),
    )


def _form(part: QuantisedWeight) -> tuple[object, ...]:
    absent = (part.zeros is None, part.minimums is None, part.supers is None)
    return part.codes.dtype, part.bits, part.float4, part.group_size, part.rounds_x, absent


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    there = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(there) if there else None


def _equal(order: Tensor | None, other: Tensor | None) -> bool:
    return order is not None and other is not None and torch.equal(order, other)


def _int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    scales = rows.abs().amax(1, keepdim=True) / LARGEST["int8"]
    codes = (rows / scales.where(scales > 0, 1)).round_() + 128
    return codes.to(torch.uint8), scales


def _float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    scales = rows.abs().amax(1, keepdim=True) / LARGEST["fp8"]
    return (rows / scales.where(scales > 0, 1)).to(torch.float8_e4m3fn), scales


def _int4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The number furthest from 0 becomes -8, the further end of the range; scales are float16."""
    columns = rows.shape[1]
    padded = torch.nn.functional.pad(rows, (0, -columns % INT4_GROUP))
    groups = padded.reshape(len(rows), -1, INT4_GROUP)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best_codes, best_scales, least = torch.empty(0), torch.empty(0), torch.empty(0)
    for shrink in INT4_SHRINKS:
        scales = (extreme * (shrink / -LARGEST["int4"])).half().float()
        codes = (groups / scales.where(scales != 0, 1)).round_().clamp_(-8, 7)
        error = (codes * scales).sub_(groups).square_().sum(2, keepdim=True)
        if shrink == INT4_SHRINKS[0]:
            best_codes, best_scales, least = codes, scales, error
            continue
        better = error < least
        best_codes, best_scales = codes.where(better, best_codes), scales.where(better, best_scales)
        least = error.minimum(least)
    whole = (best_codes + 8).to(torch.uint8).flatten(1)
    return (whole[:, 0::2] | whole[:, 1::2] << 4)[:, : -(-columns // 2)].contiguous(), best_scales.squeeze(2)
