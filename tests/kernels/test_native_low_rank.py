"""Low-rank updates in C++ are those in plain torch, on every instruction set this machine has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.native_kernels import DTYPES, assert_close, randn, several
from torch import Tensor

from splitserve.kernels.low_rank import TorchLowRank

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
_cpu = native_cpu._cpu
RANKS = (1, 8, 16, 48, 64)
CPU = torch.device("cpu")


def filled(updates: Any, ranks: tuple[int, ...], k: int, n: int, dtype: torch.dtype) -> Any:
    for slot, rank in enumerate(ranks):
        updates.put(slot, randn(rank, k, dtype=dtype, seed=slot), randn(n, rank, dtype=dtype, seed=99 + slot))
    return updates


def added(updates: Any, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    result = out.clone()
    updates.add(result, x, slots)
    return result


def inputs(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return randn(m, n, dtype=dtype, seed=7), randn(m, k, dtype=dtype, seed=8)


@several
@given(
    slots=st.lists(st.integers(-2, len(RANKS)), min_size=1, max_size=90),
    k=st.integers(1, 300),
    n=st.integers(1, 150),
    dtype=DTYPES,
)
def test_each_row_gets_the_update_of_its_slot(
    native: native_cpu.NativeCpuKernels, slots: list[int], k: int, n: int, dtype: torch.dtype
) -> None:
    row_slots, (out, x) = torch.tensor(slots, dtype=torch.int32), inputs(len(slots), k, n, dtype)
    own = filled(native.low_rank(k, n, 64, len(RANKS) + 1, dtype, CPU), RANKS, k, n, dtype)
    found = added(own, out, x, row_slots)
    exact = added(filled(TorchLowRank(), RANKS, k, n, torch.float64), out.double(), x.double(), row_slots)
    assert_close(found, exact.to(dtype))
    without = (row_slots < 0) | (row_slots == len(RANKS))  # the last slot is empty
    assert torch.equal(found[without], out[without])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "n"), [(501, 333), (1024, 2100)])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_by_several_threads(
    native: native_cpu.NativeCpuKernels, dtype: torch.dtype, k: int, n: int
) -> None:
    updates = filled(native.low_rank(k, n, 64, len(RANKS), dtype, CPU), RANKS, k, n, dtype)
    out, x = inputs(120, k, n, dtype)
    slots = torch.tensor([*range(-1, 5)] * 5 + [4] * 90, dtype=torch.int32)
    together = added(updates, out, x, slots)
    try:
        for threads, sizes in ((1, (1, 2, 5, 13)), (2, (1, 2, 3, 29, 120)), (3, (4, 40, 120))):
            _cpu.set_num_threads(threads)
            for size in sizes:
                for rows in (slice(0, size), slice(120 - size, 120)):
                    found = added(updates, out[rows], x[rows].clone(), slots[rows].clone())
                    assert torch.equal(found, together[rows])
    finally:
        _cpu.set_num_threads(1)


def test_zeros_of_a_block_diagonal_take_no_memory_and_change_no_bits(
    native: native_cpu.NativeCpuKernels,
) -> None:
    k, parts, dtype = 64, (256, 96, 96), torch.bfloat16
    blocks = [randn(n, 16, dtype=torch.float32, seed=n) for n in parts]
    b = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    a, (out, x) = randn(48, k, dtype=torch.float32), inputs(5, k, sum(parts), dtype)
    updates = native.low_rank(k, sum(parts), 48, 2, dtype, CPU)
    updates.put(0, a, b)
    updates.put(1, a, torch.where(b == 0, 1e-30, b))
    assert len(updates._memory[0]) < 0.6 * len(updates._memory[1])
    found = [added(updates, out, x, torch.full((5,), slot, dtype=torch.int32)) for slot in range(2)]
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slot_that_is_cleared_adds_nothing_and_takes_another_rank(
    native: native_cpu.NativeCpuKernels, dtype: torch.dtype
) -> None:
    k, n = 70, 50
    (out, x), slots = inputs(6, k, n, dtype), torch.tensor([0, 1, 0, -1, 1, 1], dtype=torch.int32)
    updates = filled(native.low_rank(k, n, 64, 2, dtype, CPU), (48, 16), k, n, dtype)
    before = added(updates, out, x, slots)
    updates.clear(0)
    cleared = added(updates, out, x, slots)
    assert torch.equal(cleared[slots != 1], out[slots != 1])
    assert torch.equal(cleared[slots == 1], before[slots == 1])
    for rank in (8, 64):
        for each in (updates, again := native.low_rank(k, n, 64, 2, dtype, CPU)):
            each.put(0, randn(rank, k, dtype=torch.float32), randn(n, rank, dtype=torch.float32))
        found, expected = (added(each, out, x, slots) for each in (updates, again))
        assert torch.equal(found[slots == 0], expected[slots == 0])
        assert torch.equal(found[slots == 1], before[slots == 1])
