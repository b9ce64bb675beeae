"""Low-rank updates of linear layers (Hu et al., LoRA, 2021) in plain torch: see ``interface.LowRank``."""

from __future__ import annotations

from torch import Tensor


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
