"""Several ranks of one process: each computes some KV heads of the one pool, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.native_kernels import DTYPES, REFERENCE, randn, several
from torch import Tensor

from splitserve.bench.kernels.kernel_inputs import mixture_weights
from splitserve.kernels.interface import (
    INT8_SCALE_BYTES,
    AttentionInputs,
    DenseMlp,
    Kernels,
    LayerParts,
    RopeInputs,
)
from splitserve.kernels.mixture_shape import MixtureShape

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
NUM_BLOCKS, LAYER, UNTOUCHED = 40, 1, 0x7F
Cache = Literal["plain", "fp8", "int8"]


def empty_pool(heads: int, planes: int, block_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    row = head_dim + INT8_SCALE_BYTES * (dtype == torch.int8)
    shape = (NUM_BLOCKS, 2, planes, heads, block_size, row * dtype.itemsize)
    return torch.full(shape, UNTOUCHED, dtype=torch.uint8).view(dtype)


@several
@given(
    data=st.data(),
    dtype=DTYPES,
    cache=st.sampled_from(["plain", "fp8", "int8"]),
    head_dim=st.sampled_from([8, 64, 80]),
    group=st.integers(1, 4),
    planes=st.sampled_from([1, 2]),
    block_size=st.sampled_from([8, 16, 48]),
    length=st.integers(1, 300),
)
def test_some_heads_of_a_wider_pool_are_read_and_written_as_a_pool_of_those_heads(
    native: native_cpu.NativeCpuKernels, data: st.DataObject, dtype: torch.dtype, cache: Cache,
    head_dim: int, group: int, planes: int, block_size: int, length: int,
) -> None:  # fmt: skip
    """In C++ and in plain torch; no byte of another head is written."""
    heads = data.draw(st.integers(1, 5))
    first = data.draw(st.integers(0, heads - 1))
    own = data.draw(st.integers(1, heads - first))
    held = {"plain": dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}[cache]
    table = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(length)).int()
    positions = torch.arange(length, dtype=torch.int32)
    slots = table[positions // block_size].long() * block_size + positions % block_size
    scales = torch.rand(2, 2, own) + 0.5 if cache == "fp8" else None
    rope = RopeInputs(
        positions, slots, randn(length, head_dim, dtype=torch.float32), group * own, own, head_dim,
        kv_scales=scales,
    )  # fmt: skip
    qkv = randn(length, (group + planes) * own * head_dim, dtype=dtype, seed=1)
    queries = data.draw(st.integers(0, length - 1))  # beside a sequence with one
    starts, lengths = torch.tensor([0, 1, 1 + queries]).int(), torch.tensor([length, length]).int()
    inputs = AttentionInputs(starts, lengths, table.repeat(2, 1), head_dim**-0.5, kv_scales=scales)

    def outputs(kernels: Kernels, pool: Tensor) -> tuple[Tensor, Tensor]:
        q = kernels.rope_and_store(qkv.clone(), pool, LAYER, rope)
        return q, kernels.paged_attention(q[: 1 + queries], pool, LAYER, inputs)

    for kernels in (native, REFERENCE):
        wide, alone = (empty_pool(n, planes, block_size, head_dim, held) for n in (heads, own))
        view = wide[:, :, :, first : first + own]
        for found, expected in zip(outputs(kernels, view), outputs(kernels, alone), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(view.view(torch.uint8), alone.view(torch.uint8))
        view.view(torch.uint8).fill_(UNTOUCHED)
        assert (wide.view(torch.uint8) == UNTOUCHED).all(), "another head was written"


class Rank:
    """One rank's weights, its own part of a step's work, and two threads."""

    def __init__(self, number: int) -> None:
        self.kernels = native_cpu.NativeCpuKernels(2, native_cpu._cpu.instruction_sets()[0], rank=number)
        self._x = randn(24, 128, dtype=torch.float32, seed=number)
        shape = MixtureShape(8, 2, 512, 32 + 16 * number, True, "silu")
        self._tokens = randn(
            512, 512, dtype=torch.float32, seed=number
        )  # enough to share all that a mixture does
        self._mixture = self.kernels.mixture(mixture_weights(shape, torch.float32))
        sizes = (3 * 64, 128), (128, 64), (2 * 256, 128), (128, 256)
        linears = [
            self.kernels.linear(randn(*size, dtype=torch.float32, seed=10 * number + i) / 8, None)
            for i, size in enumerate(sizes)
        ]
        norm, angles = torch.ones(128), randn(24, 64, dtype=torch.float32, seed=5)
        mlp = DenseMlp(linears[2], "silu", linears[3], 256)
        layer = LayerParts(
            norm, linears[0], None, None, False, angles, linears[1], None, norm, mlp, None, None
        )
        self._layers = self.kernels.fuse_layers([layer, layer], 1e-5)
        positions, lengths = torch.arange(24, dtype=torch.int32), torch.tensor([24], dtype=torch.int32)
        self._rope = RopeInputs(positions, positions.long(), angles, 1, 1, 64)
        self._attention = AttentionInputs(
            torch.tensor([0, 24], dtype=torch.int32), lengths, torch.arange(2, dtype=torch.int32)[None], 0.125
        )

    def outputs(self) -> list[Tensor]:
        hidden, residual, pool = torch.zeros_like(self._x), self._x.clone(), torch.zeros(2, 2, 2, 1, 16, 64)
        assert self._layers is not None
        self._layers(0, 2, hidden, residual, pool, self._rope, self._attention)
        return [hidden, residual, pool, self._mixture(self._tokens)]


def on_a_new_thread(work: Callable[[], list[Tensor]]) -> list[Tensor]:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


@pytest.mark.timeout(60)
def test_ranks_compute_at_once_each_with_its_own_helpers() -> None:
    """From whichever thread a rank's helpers are used."""
    ranks: list[Rank] = []
    alone = [on_a_new_thread(lambda i=i: ranks.append(Rank(i)) or ranks[i].outputs()) for i in range(2)]
    both = Barrier(2)

    def wrong_at_once(i: int) -> int:
        ranks[i].kernels.use_this_thread()
        both.wait(60)
        return sum(
            not all(torch.equal(*pair) for pair in zip(ranks[i].outputs(), alone[i], strict=True))
            for _ in range(50)
        )

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(wrong_at_once, range(2))) == [0, 0]
