"""Step times by arithmetic: a roofline of FLOPs and bytes, and overheads that are fitted to measured steps
(bench/studies/analytic.py).

    seconds = step_s + seq_s * sequences + layers * (layer_s + sums) + matmuls + attention
    a matmul = ((FLOPs / (compute * FLOP/s)) ^ p + (bytes / (memory * bytes/s)) ^ p) ^ (1 / p)

A layer of a split model ends in two sums over its GPUs, each of ``sum_s`` seconds and its bytes. Of a
mixture's experts a step reads those that its tokens use: ``1 - (1 - active / experts) ^ tokens`` of them.
Each expert has a copy of a token's row, which is written and read before and after it, on every GPU.

GPUs are known by name, with what their makers publish: rates of dense arithmetic, links and networks in one
direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Any

from .shapes import Shape


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

KNOTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of a step at which the curve may bend."""


@dataclass(frozen=True, slots=True)
class Software:
    """The constants of an engine.

    ``compute``, ``memory``, ``attention``, ``links``: shares of the published rates; ``experts``: share of
    ``compute`` that the many small products of routed experts reach. Overheads in seconds:
    ``layer_s`` of a layer, ``sum_s`` of a sum over GPUs, ``routing_s`` of a layer of experts, ``step_s`` of a
    step, ``seq_s`` of a sequence in it, ``prompt_s`` of a prompt step besides. ``sharpness``: p above."""

    compute: float
    memory: float
    attention: float
    links: float
    layer_s: float
    sum_s: float
    step_s: float
    seq_s: float
    prompt_s: float = 0.0
    routing_s: float = 0.0
    sharpness: float = 3.0
    experts: float = 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on ``gpus`` GPUs, each with a part of every layer, and a slice of each expert, as the measured
    servers had; ``bits``: of a weight, ``kv_bytes``: of an element in the KV cache."""

    shape: Shape
    gpu: Gpu
    gpus: int
    bits: float
    software: Software
    kv_bytes: int = 2

    def prefill(self) -> dict[str, Any]:
        """Prompt steps, as a profile's file has them."""
        once = self.software.prompt_s + self._head_s(1)
        return _steps(
            [(n, self.tokens_s(n) + once + n * self._chosen_pairs_s()) for n in KNOTS],
            read_s=self._pair_s(),
            seq_s=self.software.seq_s,
            cached_s=self._token_read_s(),
        )

    def decode(self) -> dict[str, Any]:
        """Steps of one token a sequence, as a profile's file has them."""
        seq_s = self.software.seq_s + self._chosen_reads_s()
        return _steps(
            [(n, self.tokens_s(n) + n * seq_s + self._head_s(n)) for n in KNOTS if n <= 1024],
            read_s=self._token_read_s(),
        )

    def tokens_s(self, tokens: float) -> float:
        """Seconds of everything but attention and the output head."""
        shape, soft = self.shape, self.software
        layer_s = soft.layer_s + self._matmul_s(tokens, shape.dense, 1.0, self.bits) + self.sums_s(tokens)
        if shape.experts:
            routed = shape.experts * shape.expert
            share = shape.expert_share(tokens)
            bits = shape.expert_bits or self.bits
            rows = tokens * shape.active / shape.experts
            layer_s += soft.routing_s + self._matmul_s(rows, routed, share, bits, soft.experts)
            width = shape.expert / (3 * shape.hidden) / self.gpus
            copied = 4 * tokens * shape.active * (shape.hidden + width)  # rows to and from experts
            layer_s += 2 * copied / self._bytes_per_s
        return soft.step_s + shape.layers * layer_s

    @property
    def _bytes_per_s(self) -> float:
        return self.software.memory * self.gpu.reached * self.gpu.bandwidth

    def _matmul_s(
        self, tokens: float, weights: float, share: float, bits: float, reached: float = 1.0
    ) -> float:
        """Time ``tokens`` rows through ``weights`` weights; ``share``: of them that are read; ``reached``: of
        the FLOP/s that other products reach."""
        soft, rate = self.software, reached * self.gpu.flops(bits)
        flops_s = 2 * tokens * weights / self.gpus / (soft.compute * rate)
        bytes_s = share * weights * bits / 8 / self.gpus / self._bytes_per_s
        p = soft.sharpness
        return float((flops_s**p + bytes_s**p) ** (1 / p))

    def _head_s(self, rows: float) -> float:
        return self._matmul_s(rows, self.shape.head, 1.0, 16)

    def sums_s(self, tokens: float) -> float:
        """Two sums over the GPUs, and the fixed time of other exchanges."""
        if self.gpus == 1:
            return 0.0
        moved = 2 * (self.gpus - 1) / self.gpus * tokens * self.shape.hidden * 2
        once = self.software.sum_s * (1 + self.gpu.rounds * log2(self.gpus / 2))
        sums = 2 * (once + moved / (self.software.links * self.gpu.summed * self.gpu.link))
        return sums + self.shape.exchanges * once

    def _pair_s(self) -> float:
        """Seconds of attention for a query and a key; where it is sparse: of its index, which every GPU has
        the whole of."""
        shape, rate = self.shape, self.software.attention * self.gpu.bf16
        if shape.chosen:
            return shape.layers * shape.indexed * shape.index_flops / rate
        return shape.layers * shape.attended * shape.pair_flops / self.gpus / rate

    def _chosen_pairs_s(self) -> float:
        """Seconds of sparse attention for a query and all keys that it attends to, however few it sees."""
        shape, rate = self.shape, self.software.attention * self.gpu.bf16
        return shape.layers * shape.chosen * shape.pair_flops / self.gpus / rate

    def _token_read_s(self) -> float:
        """Seconds to read the KV cache of one token; where attention is sparse: the index keys."""
        shape = self.shape
        if shape.chosen:
            return self._read_s(shape.indexed * shape.index_kv)
        return self._read_s(shape.attended * shape.token_kv)

    def _chosen_reads_s(self) -> float:
        """Seconds to read the tokens that one of sparse attention attends to, however few it sees."""
        shape = self.shape
        return shape.chosen * self._read_s(shape.token_kv - shape.index_kv)

    def _read_s(self, elements: float) -> float:
        """Seconds to read these of each layer."""
        shape = self.shape
        elements *= shape.layers
        return elements * self.kv_bytes / min(self.gpus, shape.kv_heads) / self._bytes_per_s


def _steps(curve: list[tuple[int, float]], **slopes: float) -> dict[str, Any]:
    return {"pieces": [{"curve": curve, **slopes}]}
