"""The GPU's kernels of recurrent layers beside their references, and how fast they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ...kernels.delta_net import DeltaNetShape, DeltaNetWeights, delta_net
from ...kernels.gpu.delta_net import delta_net as gpu_delta_net
from ...kernels.gpu.short_conv import short_conv as gpu_short_conv
from ...kernels.short_conv import ShortConvShape, ShortConvWeights, short_conv
from ...kernels.state_shape import NO_STATE, StatePlace, num_state_blocks
from ...kernels.states import StateInputs
from .gpu_timing import Call, Ceilings, Figure, flops_figure, microseconds
from .kernel_inputs import LAYER, randn, relative_error

BFLOAT16 = torch.bfloat16
QWEN3_NEXT, LFM2 = DeltaNetShape(16, 32, 128, 128, 4), ShortConvShape(2048, 3)
GRANITE = DeltaNetShape(1, 48, 128, 64, 4, delta_rule=False)
TINY, TINY_CONV = DeltaNetShape(2, 4, 16, 16, 4), ShortConvShape(64, 3)
TINY_MAMBA = DeltaNetShape(1, 4, 16, 16, 4, delta_rule=False)
SHAPES: dict[bool, dict[str, DeltaNetShape | ShortConvShape]] = {
    True: {"gated delta net": QWEN3_NEXT, "Mamba-2": GRANITE, "short convolution": LFM2},
    False: {"gated delta net": TINY, "Mamba-2": TINY_MAMBA, "short convolution": TINY_CONV},
}
"""For a GPU, or not."""
BLOCK_SIZE, HEAD_DIM, KV_HEADS = 64, 128, 2


@dataclass(frozen=True, slots=True)
class StateCase:
    """A step of sequences of ``counts`` tokens. ``sources``: see ``StateInputs``."""

    shape: DeltaNetShape | ShortConvShape
    counts: Sequence[int]
    sources: Sequence[int]
    marks: Sequence[int]
    dtype: torch.dtype = torch.float32

    @property
    def pool_size(self) -> tuple[int, ...]:
        return 3 * self.num_blocks * len(self.counts) + 1, LAYER + 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM

    def pool(self) -> Tensor:
        """Random numbers, which differ from block to block."""
        return randn(*self.pool_size, seed=3)

    @property
    def num_blocks(self) -> int:
        return num_state_blocks(self.shape, KV_HEADS, 4 * BLOCK_SIZE * HEAD_DIM)

    @property
    def projected(self) -> Tensor:
        return randn(sum(self.counts), self.shape.width, dtype=self.dtype, seed=5)

    def inputs(self, device: str) -> StateInputs:
        starts = torch.tensor([0, *self.counts], dtype=torch.int32).cumsum(0).int()
        count = 3 * self.num_blocks * len(self.counts)
        blocks = torch.randperm(count, generator=torch.Generator().manual_seed(1)).int()
        tables = blocks.view(len(self.counts), 3, -1)
        which, marks = (torch.tensor(of, dtype=torch.int32) for of in (self.sources, self.marks))
        return StateInputs(starts.to(device), tables.to(device), which.to(device), marks.to(device))

    def kernel(self, device: str, on_gpu: bool) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a call with the projection and the pool; all else is on the device before."""
        shape, place, inputs = self.shape, StatePlace(LAYER, 0), self.inputs(device)
        if isinstance(shape, ShortConvShape):
            short = ShortConvWeights(randn(shape.conv_size, shape.channels, seed=1, device=device))
            convolve = gpu_short_conv if on_gpu else short_conv
            return lambda x, pool: convolve(x, pool, place, shape, short, inputs)
        of = shape.num_value_heads
        conv = randn(shape.channels, shape.conv_size, dtype=self.dtype, seed=1, device=device)
        decay, dt = randn(of, seed=2, device=device).exp(), randn(of, seed=3, device=device)
        norm = 1 + randn(shape.value_dim, seed=4, device=device) / 4
        weights = DeltaNetWeights(conv, decay, dt, norm, 1e-6)
        if not shape.delta_rule:
            bias = randn(shape.channels, seed=4, device=device)
            weights = DeltaNetWeights(conv, decay / 8, dt, conv_bias=bias, skip=dt)
        mix = gpu_delta_net if on_gpu else delta_net
        return lambda x, pool: mix(x, pool, place, shape, weights, inputs)


def state_error(shape: DeltaNetShape | ShortConvShape, dtype: torch.dtype, big: bool, device: str) -> float:
    """Return the larger of two errors: the output's, and that of the pool after the step."""
    counts = (1, 130, 1, 64) if big else (1, 9, 1)
    case = StateCase(shape, counts, (0, NO_STATE, 1, 1)[: len(counts)], (1, 64, 0, 64)[: len(counts)], dtype)
    if not big:
        case = replace(case, marks=(1, 8, 0))
    pool = case.pool()
    there = pool.to(device, copy=True)
    expected = case.kernel("cpu", on_gpu=False)(case.projected, pool)
    found = case.kernel(device, on_gpu=True)(case.projected.to(device), there)
    return max(relative_error(found.cpu(), expected), relative_error(there.cpu(), pool))


def chunks_error(shape: DeltaNetShape | ShortConvShape, big: bool, device: str) -> float:
    """Whether a sequence has other bits in chunks than in one piece."""
    length = 200 if big else 9
    whole = StateCase(shape, (length,), (NO_STATE,), (0,), BFLOAT16)
    x, source, parts = whole.projected.to(device), NO_STATE, []
    expected = whole.kernel(device, on_gpu=True)(x, whole.pool().to(device))
    pool = whole.pool().to(device)
    for start, end in pairwise((0, length // 3, length // 3 + 1, length)):
        part = replace(whole, counts=(end - start,), sources=(source,))
        parts.append(part.kernel(device, on_gpu=True)(x[start:end].contiguous(), pool))
        source = 0 if source == NO_STATE else 1 - source
    return float(not torch.equal(torch.cat(parts), expected))


def state_figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
    """Decode steps beside reading and writing the states once; prompts beside the FLOPs of their tokens."""
    shape, conv = (QWEN3_NEXT, LFM2) if big else (TINY, TINY_CONV)
    for num_seqs in (1, 32, 128) if big else (2,):
        case = StateCase(shape, (1,) * num_seqs, (0,) * num_seqs, (0,) * num_seqs, BFLOAT16)
        us = microseconds(_calls(case, device, 1 if num_seqs > 1 else 8))
        num_bytes = 2 * 4 * shape.num_floats * num_seqs
        what = f"gated delta net of Qwen3-Next, {num_seqs} sequences"
        yield Figure(what, us, num_bytes / ceilings.copy * 1e6, num_bytes / us * 1e6, "B")
    for tokens in (512, 2048, 8192) if big else (8,):
        of = shape.num_value_heads * shape.key_dim * shape.value_dim
        us = microseconds(_calls(StateCase(shape, (tokens,), (NO_STATE,), (0,), BFLOAT16), device, 1))
        what = f"gated delta net of Qwen3-Next, a prompt of {tokens}"
        yield flops_figure(what, us, 8 * of * tokens, ceilings)
    tokens = 2048 if big else 8
    us = microseconds(_calls(StateCase(conv, (tokens,), (NO_STATE,), (0,), BFLOAT16), device, 1))
    num_bytes = 2 * 4 * conv.channels * tokens
    what = f"short convolution of LFM2, a prompt of {tokens}"
    yield Figure(what, us, num_bytes / ceilings.copy * 1e6, num_bytes / us * 1e6, "B")


def _calls(case: StateCase, device: str, count: int) -> list[Call]:
    kernel, x = case.kernel(device, on_gpu=True), case.projected.to(device)
    return [partial(kernel, x, torch.randn(case.pool_size, device=device)) for _ in range(count)]
