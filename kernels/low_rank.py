"""Low-rank updates of linear layers (Hu et al., LoRA, 2021); the reference in plain torch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LowRank(Protocol):
    """The updates B A of one ``Linear`` by several adapters, each in a slot of its own."""

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        """a [rank, in_features], b [out_features, rank], on the host or the device, of any float type; a rank
        up to ``max_rank``. No step that runs meanwhile uses the slot."""

    def clear(self, slot: int) -> None:
        """The slot adds nothing any more."""

    def add(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        """out += B A x in place, by row: out [num_tokens, out_features], x [num_tokens, in_features], slots
        int32 [num_tokens], negative: nothing is added. A row's bits do not depend on the others."""


class TorchLowRank:
    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def put(self, slot: int, a: Tensor, b: Tensor) -> None:
        self._pairs = {**self._pairs, slot: (a.float(), b.float())}  # a step may go through the one before

    def clear(self, slot: int) -> None:
        self._pairs = {other: pair for other, pair in self._pairs.items() if other != slot}

    def add(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        for slot, (a, b) in self._pairs.items():
            rows = (slots == slot).nonzero()[:, 0]
            if len(rows):
                update = x[rows].float() @ a.t().to(x.device) @ b.t().to(x.device)
                out[rows] = (out[rows].float() + update).to(out.dtype)
