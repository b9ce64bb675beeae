"""Linear layers of quantised weights on CPUs: see cpu/quantised.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from . import _cpu
from .native_layers import DTYPE_CODES
from .packed_weights import PackedWeights
from .quantised import INT4_GROUP, SUPER_BLOCK, QuantisedWeight, Scheme, joined_weight, quantise

FLOAT4, FLOAT8 = 5, 9
MOST_BLOCK = 128  # inputs whose sum is kept in whole numbers
BLOCK_UNIT = 8


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Sizes of some outputs of a linear; ``kind`` and the rest as QuantisedPart of cpu/kernels.h."""

    rows: int
    columns: int
    kind: int
    group_size: int
    one_scale: bool  # a row has one scale, applied at its end
    scale_bytes: int = 0
    has_offsets: bool = False
    x_bits: int = 16

    @staticmethod
    def of(weight: QuantisedWeight) -> PartLayout:
        offsets = weight.offsets
        kind = FLOAT8 if weight.is_float8 else FLOAT4 if weight.float4 else weight.bits
        of_a_byte = weight.float4 or weight.supers is not None
        one_scale = weight.scales.shape[1] == 1 and offsets is None and not of_a_byte
        scale_bytes = 0 if one_scale else 1
        if not of_a_byte and not one_scale:
            halves = all(bool((t == t.half()).all()) for t in (weight.scales, offsets) if t is not None)
            scale_bytes = 2 if halves else 4
        return PartLayout(
            weight.out_features, weight.in_features, kind, weight.group_size, one_scale,
            scale_bytes, offsets is not None, 8 if weight.rounds_x else 16,
        )  # fmt: skip

    @property
    def has_supers(self) -> bool:
        return self.scale_bytes == 1 and self.kind != FLOAT4

    @property
    def block(self) -> int:
        if self.group_size >= self.columns:
            return min(MOST_BLOCK, -(-self.columns // BLOCK_UNIT) * BLOCK_UNIT)
        sizes = range(min(MOST_BLOCK, self.group_size), 0, -1)
        return next(size for size in sizes if size % BLOCK_UNIT == 0 and self.group_size % size == 0)

    def panel_bytes(self, panel: int) -> int:
        codes = self.block * (4 if self.kind in (4, FLOAT4) else 8) // 8
        blocks = -(-self.columns // self.block)
        return self.padded_rows(panel) * blocks * (codes + self.scale_bytes * (1 + self.has_offsets))

    def num_bytes(self, panel: int) -> int:
        """Size of the panels and, behind them, the rows' float32 scales or the super-blocks' float16."""
        behind = 4 if self.one_scale else 0
        if self.has_supers:
            behind = 2 * (1 + self.has_offsets) * -(-self.columns // SUPER_BLOCK)
        return self.panel_bytes(panel) + behind * self.padded_rows(panel)

    def padded_rows(self, panel: int) -> int:
        return -(-self.rows // panel) * panel


class QuantisedLinear:
    """Weights of one or several forms, their outputs side by side, in panels that are read as they are."""

    rows = 1 << 30  # it is used for fewer than that

    def __init__(
        self, weights: Sequence[QuantisedWeight], bias: Tensor | None, packed: PackedWeights, panel: int
    ):
        whole = joined_weight(weights)
        parts = [whole] if whole is not None else weights
        made = [(PartLayout.of(part), _constant(part)) for part in parts]
        self._make(made, bias, packed, panel, [part.order for part in parts])

    @classmethod
    def at_load(
        cls, weight: Callable[[], Tensor], shape: tuple[int, int], scheme: Scheme, bias: Tensor | None,
        packed: PackedWeights, panel: int,
    ) -> QuantisedLinear:  # fmt: skip
        """Quantise a weight [out, in] of this shape, unless ``packed`` has it from an earlier start."""
        rows, columns = shape
        layout = {
            "int8": PartLayout(rows, columns, 8, columns, True),
            "fp8": PartLayout(rows, columns, FLOAT8, columns, True),
            "int4": PartLayout(rows, columns, 4, INT4_GROUP, False, 2),
        }[scheme]
        linear = cls.__new__(cls)
        linear._make([(layout, cache(lambda: quantise(weight(), scheme)))], bias, packed, panel)
        return linear

    def _make(
        self,
        parts: Sequence[tuple[PartLayout, Callable[[], QuantisedWeight]]],
        bias: Tensor | None,
        packed: PackedWeights,
        panel: int,
        orders: Sequence[Tensor | None] = (None,),
    ) -> None:
        self._kept: list[Tensor] = []  # the table has their addresses
        self._n, self._k = sum(layout.rows for layout, _ in parts), parts[0][0].columns
        table = [self._packed_part(layout, weight, packed, panel) for layout, weight in parts]
        for row, order in zip(table, orders, strict=True):
            if order is not None:
                self._kept.append(order.int())
                row[2] = self._kept[-1].data_ptr()
        self._table = np.array(table, np.int64)
        self._bias = None if bias is None else bias.contiguous()
        address = 0 if self._bias is None else self._bias.data_ptr()
        self.addresses = (self._table.ctypes.data, len(table), address)

    def _packed_part(
        self, layout: PartLayout, weight: Callable[[], QuantisedWeight], packed: PackedWeights, panel: int
    ) -> list[int]:
        fields = [
            0, 0, 0, layout.rows, layout.kind, layout.block,
            layout.scale_bytes, layout.has_offsets, layout.x_bits, 0, 0,
        ]  # fmt: skip

        def pack(memory: Tensor) -> None:
            of = weight()
            codes, scales, offsets = of.codes.contiguous(), of.scales.contiguous(), of.offsets
            if of.supers is not None:
                memory[end:].view(torch.float16).copy_(_in_panels(of.supers, panel))
                scales = _multiples(scales, of.supers[..., 0])
                offsets = None if offsets is None else _multiples(offsets, of.supers[..., 1])
            part = np.array([memory.data_ptr(), *fields[1:]], np.int64)
            group = -(-layout.columns // layout.block) * layout.block
            _cpu.pack_quantised(
                part.ctypes.data, codes.data_ptr(), 0 if layout.one_scale else scales.data_ptr(),
                0 if offsets is None else offsets.data_ptr(), layout.columns,
                min(layout.group_size, group) if layout.group_size < layout.columns else group,
                packed.num_threads,
            )  # fmt: skip
            if layout.one_scale:
                memory[end:].view(torch.float32)[: layout.rows] = scales.flatten()

        end = layout.panel_bytes(panel)
        memory = packed.filled(layout.num_bytes(panel), torch.uint8, pack)
        self._kept.append(memory)
        fields[0] = memory.data_ptr()
        fields[1] = memory.data_ptr() + end if layout.one_scale else 0
        if layout.has_supers:
            fields[9:] = [memory.data_ptr() + end, (SUPER_BLOCK // layout.block).bit_length() - 1]
        return fields

    def __call__(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        assert x.shape[1] == self._k
        assert self._bias is None or self._bias.dtype == x.dtype
        table, num_parts, bias = self.addresses
        y = torch.empty((x.shape[0], self._n), dtype=x.dtype)
        _cpu.linear(
            x.data_ptr(), table, num_parts, bias, y.data_ptr(), x.shape[0], self._n, self._k,
            DTYPE_CODES[x.dtype],
        )  # fmt: skip
        return y


def _in_panels(supers: Tensor, panel: int) -> Tensor:
    """[out, super-blocks, parts] -> float16, flat: [panel][super-block][part][row of the panel]."""
    padded = torch.nn.functional.pad(supers, (0, 0, 0, 0, 0, -len(supers) % panel))
    return padded.half().reshape(-1, panel, *supers.shape[1:]).permute(0, 2, 3, 1).flatten()


def _multiples(values: Tensor, supers: Tensor) -> Tensor:
    """float32 [out, groups]: whole numbers that times their super-block's are ``values``."""
    wide = supers.repeat_interleave(values.shape[1] // supers.shape[1], 1)
    return (values / wide.where(wide != 0, 1)).round_()


def _constant(weight: QuantisedWeight) -> Callable[[], QuantisedWeight]:
    return lambda: weight
