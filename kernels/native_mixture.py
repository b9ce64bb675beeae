"""A mixture of experts on a CPU: see cpu/mixture.h."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from . import _cpu
from .interface import MixtureWeights, joined
from .mixture_shape import ACTIVATIONS
from .native_layers import DTYPE_CODES, address
from .packed_weights import PackedWeights


class NativeMixture:
    """See ``interface.Mixture``. ``address``: of the table that cpu/mixture.h calls MixtureWeights."""

    def __init__(self, weights: MixtureWeights, packed: PackedWeights, panel: int) -> None:
        shape, self._dtype = weights.shape, weights.router.dtype
        self._hidden_size, code = shape.hidden_size, DTYPE_CODES[self._dtype]
        router, shared = weights.router, shape.shared_size
        products = [(len(router), shape.hidden_size)]
        for size in [shape.intermediate_size] * shape.num_experts + [shared] * (shared > 0):
            products += [(2 * size, shape.hidden_size), (shape.hidden_size, size)]
        counts = [-(-n // panel) * panel * -(-k // 2) * 2 for n, k in products]
        starts = np.cumsum([0, *counts]).tolist()

        def pack(memory: Tensor) -> None:
            """One expert after the other: they are not read before."""

            def put(i: int, weight: Tensor | Sequence[Tensor]) -> None:
                whole, (n, k) = joined(weight).contiguous(), products[i]
                assert whole.shape == (n, k)
                _cpu.pack_linear(whole.data_ptr(), memory[starts[i] :].data_ptr(), n, k, code)

            put(0, router)
            for i in range(len(products) // 2):
                expert = weights.expert(i)
                put(2 * i + 1, expert.gate_up)
                put(2 * i + 2, expert.down)

        self._packed = packed.filled(starts[-1], self._dtype, pack)
        self._biases = weights.router_bias, weights.gate_up_biases, weights.down_biases
        self._correction = weights.correction
        biases = [address(weights.router_bias)]
        for i in range(len(products) // 2):
            for of in self._biases[1:]:
                biases.append(0 if of is None else of[i].data_ptr())
        base, item = self._packed.data_ptr(), self._dtype.itemsize
        places = [
            part
            for start, bias in zip(starts[:-1], biases, strict=True)
            for part in (base + start * item, bias)
        ]
        self._table = np.array(
            [
                *places[:2], address(weights.correction), shape.num_experts, shape.num_chosen,
                shape.num_groups, shape.chosen_groups, shape.normalized, shape.sigmoid,
                np.float64(shape.factor).view(np.int64), shape.hidden_size, shape.intermediate_size,
                shared, shape.shared_gated, ACTIVATIONS.index(shape.activation), *places[2:],
            ],
            np.int64,
        )  # fmt: skip
        self.address = self._table.ctypes.data

    def __call__(self, x: Tensor) -> Tensor:
        found = (x.dtype, x.shape[1], x.is_contiguous())
        assert found == (self._dtype, self._hidden_size, True), found
        y = torch.empty_like(x)
        _cpu.mixture(self.address, x.data_ptr(), y.data_ptr(), len(x), DTYPE_CODES[x.dtype])
        return y
