"""A mixture of experts on CPUs: see cpu/mixture.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from . import _cpu
from .mixture_shape import ACTIVATIONS
from .mixture_weights import MixtureWeights
from .native_layers import DTYPE_CODES, address
from .quantised import Weight


class Addressed(Protocol):
    addresses: tuple[int, int, int]
    """A Matrix of cpu/kernels.h; what it names lives as long as this object."""


MakeLinear = Callable[[Weight | Sequence[Weight], Tensor | None], Addressed]


class NativeMixture:
    """See ``mixture_weights.Mixture``. ``address``: of the table that cpu/mixture.h calls MixtureWeights."""

    def __init__(self, weights: MixtureWeights, router: Addressed, linear: MakeLinear) -> None:
        """``linear``: see ``Kernels.linear``. One expert after the other is read and packed."""
        shape, self._dtype = weights.shape, weights.router.dtype
        held = shape.held
        self._hidden_size = shape.hidden_size
        self._correction = weights.correction  # the table has the addresses of these
        self._linears = [router]
        biases = weights.gate_up_biases, weights.down_biases
        for place, i in enumerate([*held, shape.num_experts] if shape.shared_size else held):
            expert = weights.expert(i)
            for weight, of in zip((expert.gate_up, expert.down), biases, strict=True):
                self._linears.append(linear(weight, None if of is None else of[place]))
        places = [part for own in self._linears for part in own.addresses]
        self._table = np.array(
            [
                *places[:3], address(weights.correction), shape.num_experts, held.start, len(held),
                shape.num_chosen, shape.num_groups, shape.chosen_groups, shape.normalized, shape.sigmoid,
                np.float64(shape.factor).view(np.int64), shape.hidden_size, shape.intermediate_size,
                shape.shared_size, shape.shared_gated, ACTIVATIONS.index(shape.activation), *places[3:],
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
