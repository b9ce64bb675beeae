"""Adapters (LoRA; Hu et al., 2021): out = W x + B A x, with the A and B of each token's own adapter.

Layers that are one product here (q, k and v; gate and up) have one A, with the rows of all, and one B, with
those of each in a block of its diagonal. Both are split among ranks as the weight is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.interface import Kernels, Linear
from ...kernels.low_rank import LowRank
from ..errors import AdapterError

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""By layer: A [rank, in_features] and B [out_features, rank]."""
Part = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""This rank's part of A and B."""


class StepSlots:
    """Each token row's adapter in the step that is computed: int32 [num_tokens], negative: none; None: no row
    has one."""

    now: Tensor | None = None


class AdaptedLinear:
    def __init__(self, base: Linear, updates: LowRank, slots: StepSlots) -> None:
        self.base, self.updates, self._slots = base, updates, slots

    def __call__(self, x: Tensor) -> Tensor:
        out = self.base(x)
        if self._slots.now is not None:
            self.updates.add(out, x, self._slots.now)
        return out


def base_of(linear: Linear) -> Linear:
    """Return what it is without adapters."""
    return linear.base if isinstance(linear, AdaptedLinear) else linear


class Size(NamedTuple):
    num_inputs: int
    num_outputs: int


@dataclass(frozen=True, slots=True)
class _Product:
    """Layers whose outputs stand side by side."""

    names: Sequence[str]
    updates: LowRank
    part: Part

    def put(self, slot: int, sizes: Mapping[str, Size], pairs: Pairs) -> None:
        there = [name for name in self.names if name in pairs]
        if not there:
            self.updates.clear(slot)
            return
        b = torch.block_diag(  # type: ignore[no-untyped-call]
            *(_b_of(name, sizes[name], pairs) for name in self.names)
        )
        self.updates.put(slot, *self.part(torch.cat([pairs[name][0].float() for name in there]), b))


class RankAdapters:
    """The slots of one rank's layers."""

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype, device: torch.device, num_slots: int, max_rank: int
    ) -> None:
        self.num_slots, self._max_rank = num_slots, max_rank
        self._kernels, self._dtype, self._device = kernels, dtype, device
        self._graphs = device.type != "cpu"  # recorded with slots, also where no row has an adapter
        self.step, self._slot_of = StepSlots(), dict[str, int]()
        self._products: list[_Product] = []
        self._sizes: dict[str, Size] = {}

    @property
    def text_model(self) -> str:
        """The beginning of the layers' names."""
        return next(iter(self._sizes)).partition("layers.")[0]

    def adapted(self, linear: Linear, sizes: Mapping[str, Size], part: Part) -> Linear:
        """Return the product of the layers with these names and (whole) sizes, with slots for adapters."""
        self._sizes |= sizes
        num_inputs = next(iter(sizes.values())).num_inputs
        whole = torch.empty(0, num_inputs), torch.empty(sum(size.num_outputs for size in sizes.values()), 0)
        a, b = part(*whole)
        most = self._max_rank * len(sizes)
        updates = self._kernels.low_rank(
            a.shape[1], b.shape[0], most, self.num_slots, self._dtype, self._device
        )
        self._products.append(_Product(list(sizes), updates, part))
        return AdaptedLinear(linear, updates, self.step)

    def check(self, pairs: Pairs) -> None:
        """Raise AdapterError where these do not fit the model."""
        kinds = sorted({name.rpartition(".")[2] for name in self._sizes})
        for name, (a, b) in pairs.items():
            size = self._sizes.get(name)
            if size is None:
                raise AdapterError(f"it changes {name}; adapters can change {', '.join(kinds)} of this model")
            if len(a) > self._max_rank:
                raise AdapterError(
                    f"its rank is {len(a)}, more than --max-lora-rank {self._max_rank}: raise that"
                )
            if (found := Size(a.shape[1], b.shape[0])) != size:
                raise AdapterError(
                    f"{name} has {size.num_inputs} inputs and {size.num_outputs} outputs, in the adapter "
                    f"{found.num_inputs} and {found.num_outputs}: it is of another model"
                )

    def put(self, slot: int, content: str, pairs: Pairs) -> None:
        """Place a checked adapter. No step that runs meanwhile uses the slot."""
        self.clear(slot)
        for product in self._products:
            product.put(slot, self._sizes, pairs)
        self._slot_of[content] = slot

    def clear(self, slot: int) -> None:
        """No batch has its adapter any more."""
        self._slot_of = {content: other for content, other in self._slot_of.items() if other != slot}

    def slots_of(self, contents: Sequence[str], starts: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """Return a batch's ``StepSlots``. ``contents``: ``Batch.adapters``; ``starts``: where each sequence's
        rows begin, and the end. Raises AdapterError."""
        if not (contents or self._graphs):
            return None
        try:
            slots = [
                self._slot_of[content] if content else -1 for content in contents or [""] * (len(starts) - 1)
            ]
        except KeyError as error:
            raise AdapterError(f"the adapter of content {error} is not on this worker") from None
        return np.repeat(np.array(slots, np.int32), np.diff(starts))


def _b_of(name: str, size: Size, pairs: Pairs) -> Tensor:
    return pairs[name][1].float() if name in pairs else torch.empty(size.num_outputs, 0)
