"""Low-rank updates on CPUs, by C++: see cpu/low_rank.h for the layout."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _cpu
from .huge_pages import ALIGNMENT, HugePageArena
from .native_layers import DTYPE_CODES
from .native_linear import check_rows


class NativeLowRank:
    """See ``low_rank.LowRank``. ``address``: of the table of slots."""

    def __init__(
        self, in_features: int, out_features: int, num_slots: int, dtype: torch.dtype, panel: int,
        arena: HugePageArena,
    ) -> None:  # fmt: skip
        self._n, self._k, self._dtype, self._panel = out_features, in_features, dtype, panel
        self._depth = 2 if dtype == torch.bfloat16 else 1  # numbers that lie interleaved
        self._table = np.zeros((num_slots, 5), np.int64)  # a LowRankSlot each
        self.address, self.num_slots = self._table.ctypes.data, num_slots
        self._arena, self._memory = arena, dict[int, Tensor]()

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        vector = self._panel // 2
        ranks = -(-len(a) // vector) * vector
        panels = self._in_panels(a, vector)
        steps = self._in_panels(pad(b, (0, ranks - len(a))), self._panel)
        used = (steps != 0).flatten(2).any(2)  # [panels, steps]
        used = used.cummax(1).values & used.flip(1).cummax(1).values.flip(1)
        starts = pad(used.sum(1).cumsum(0), (1, 0)).int()
        parts = [panels, steps[used], used.int().argmax(1).int(), starts]
        ends = np.cumsum([-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts])
        if slot not in self._memory or len(self._memory[slot]) < ends[-1]:
            self._memory[slot] = self._arena.empty(int(ends[-1]), torch.uint8)
        memory = self._memory[slot]
        for part, begin in zip(parts, [0, *ends[:-1]], strict=True):
            memory[begin : begin + part.nbytes] = part.flatten().view(torch.uint8)
        self._table[slot] = [*(memory.data_ptr() + np.array([0, *ends[:-1]])), ranks // vector]

    def clear(self, slot: int) -> None:
        self._table[slot] = 0

    def add(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        check_rows(x, self._dtype, self._k)
        check_rows(out, self._dtype, self._n)
        assert (slots.dtype, slots.shape, slots.is_contiguous()) == (torch.int32, x.shape[:1], True)
        assert len(out) == len(x)
        _cpu.low_rank(
            self.address, self.num_slots, slots.data_ptr(), x.data_ptr(), out.data_ptr(),
            len(x), self._n, self._k, DTYPE_CODES[self._dtype],
        )  # fmt: skip

    def _in_panels(self, matrix: Tensor, width: int) -> Tensor:
        """[rows, columns] as [panels, steps, width, depth]."""
        rows, columns = matrix.shape
        whole = pad(matrix.to(self._dtype), (0, -columns % self._depth, 0, -rows % width))
        return whole.view(len(whole) // width, width, -1, self._depth).transpose(1, 2).contiguous()
