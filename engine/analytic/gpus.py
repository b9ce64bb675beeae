"""GPUs by name: what their makers publish. Rates are of dense arithmetic; links and networks count one
direction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    ``fp8``, ``fp4``: FLOP/s, 0 where it has no such units; ``link``: bytes/s to the other GPUs of its host;
    ``network``: bytes/s of its share of the host's network card; ``watts``: its power limit; ``reached``:
    share of the bandwidth that kernels reach, over that of the other GPUs; ``quantised``: the same of FLOP/s
    with weights of 8 and 4 bits; ``summed``: of the link, by sums; ``rounds``: of a sum's fixed time, that
    each doubling of the GPUs adds."""

    memory: float  # bytes
    bandwidth: float  # bytes/s
    bf16: float  # FLOP/s
    fp8: float
    fp4: float
    link: float
    network: float
    watts: float
    reached: float = 1.0
    quantised: float = 1.0
    summed: float = 1.0
    rounds: float = 0.0

    def flops(self, bits: float) -> float:
        """FLOP/s with weights of this many bits; those of bf16 where there are no such units."""
        return self.quantised * (self.fp4 if bits < 8 else self.fp8 if bits == 8 else 0) or self.bf16


GPUS = {
    "a100": Gpu(80e9, 2.039e12, 312e12, 0, 0, 300e9, 25e9, 400),
    "h100": Gpu(80e9, 3.35e12, 989e12, 1979e12, 0, 450e9, 50e9, 700, rounds=1.0),
    "h200": Gpu(141e9, 4.8e12, 989e12, 1979e12, 0, 450e9, 50e9, 700, rounds=1.0),
    "b200": Gpu(180e9, 8e12, 2250e12, 4500e12, 9000e12, 900e9, 50e9, 1000, 0.85, 0.75, 0.59),
    "gb200": Gpu(186e9, 8e12, 2500e12, 5000e12, 10000e12, 900e9, 50e9, 1200, 0.85, 0.75, 0.59),
    "b300": Gpu(270e9, 8e12, 2250e12, 4500e12, 13500e12, 900e9, 100e9, 1100, 0.85, 0.75, 0.59),
    "l40s": Gpu(48e9, 0.864e12, 362e12, 733e12, 0, 32e9, 25e9, 350),
    "mi300x": Gpu(192e9, 5.3e12, 1307e12, 2615e12, 0, 448e9, 50e9, 750),
    "rtx4090": Gpu(24e9, 1.008e12, 165e12, 330e12, 0, 25e9, 3e9, 450),
    "rtx3090": Gpu(24e9, 0.936e12, 71e12, 0, 0, 25e9, 3e9, 350),
}
