"""Low-rank updates in C++ are those in plain torch, on every instruction set this machine has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.native_kernels import DTYPES, assert_close, randn, several
from torch import Tensor

from splitserve.kernels.interface import AttentionInputs, DenseMlp, LayerParts, RopeInputs
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


def sizes_of_terms(out: Tensor, x: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the second product's terms without their signs: [rows, n]."""
    sizes, k, n = out.float().abs(), x.shape[1], out.shape[1]
    for slot, rank in enumerate(RANKS):
        rows = slots == slot
        a, b = (randn(rank, k, dtype=dtype, seed=slot), randn(n, rank, dtype=dtype, seed=99 + slot))
        sizes[rows] += (x[rows].float() @ a.float().t()).abs() @ b.float().t().abs()
    return sizes


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
    exact = added(filled(TorchLowRank(), RANKS, k, n, dtype), out.double(), x.double(), row_slots)
    # bfloat16 may round what lies between the two products, whose terms may cancel
    scale = exact.abs() + 0.2 * sizes_of_terms(out, x, row_slots, dtype)
    assert_close(found, exact.to(dtype), scale)
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


def test_plain_torch_adds_while_other_slots_change() -> None:
    updates, (out, x) = (
        filled(TorchLowRank(), (8, 8, 8), 20, 30, torch.float32),
        inputs(3, 20, 30, torch.float32),
    )

    class Slots(list[int]):
        def __eq__(self, slot: object) -> Any:
            updates.clear(2)
            updates.put(5 + int(str(slot)), x, randn(30, 3, dtype=torch.float32))
            return torch.tensor([other == slot for other in self])

    expected = added(updates, out, x, torch.tensor([0, -1, 1]))
    assert torch.equal(added(updates, out, x, Slots([0, -1, 1])), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_in_one_call_add_the_same_updates(
    native: native_cpu.NativeCpuKernels, dtype: torch.dtype
) -> None:
    m, heads, size, mlp_size, eps = 9, 2, 64, 96, 1e-5
    sizes = [(3 * heads * 64, size), (size, heads * 64), (2 * mlp_size, size), (size, mlp_size)]
    linears = [native.linear(randn(*shape, dtype=dtype, seed=i) / 8, None) for i, shape in enumerate(sizes)]
    updates = [
        filled(native.low_rank(k, n, 64, 3, dtype, CPU), (16, 48, 8), k, n, torch.float32) for n, k in sizes
    ]
    norm, angles = torch.ones(size, dtype=dtype), randn(m, 64, dtype=torch.float32, seed=5)
    mlp = DenseMlp(linears[2], "silu", linears[3], mlp_size)
    parts = (norm, linears[0], None, None, False, angles, linears[1], None, norm, mlp, None, None)
    layers = native.fuse_layers([LayerParts(*parts, updates=updates), LayerParts(*parts)], eps)
    positions = torch.arange(m, dtype=torch.int32)
    rope = RopeInputs(positions, positions.long(), angles, heads, heads, 64)
    ints = [torch.tensor(values, dtype=torch.int32) for values in ([0, m], [m], [[0]])]
    attention = AttentionInputs(*ints, 0.125)
    slots = torch.tensor([0, -1, 2, 1, 1, 0, -1, 3, 2], dtype=torch.int32)
    x = randn(m, size, dtype=dtype, seed=8)

    def one_by_one(slots: Tensor | None) -> list[Tensor]:
        def product(i: int, x: Tensor) -> Tensor:
            out = linears[i](x)
            if slots is not None:
                updates[i].add(out, x, slots)
            return out

        residual, pool = x.clone(), torch.zeros(1, 1, 2, heads, 16, 64, dtype=dtype)
        q = native.rope_and_store(product(0, native.rms_norm(residual, norm, eps)), pool, 0, rope)
        attended = native.paged_attention(q, pool, 0, attention)
        normed = native.add_rms_norm(product(1, attended), residual, norm, eps)
        return [product(3, native.gate_mul(product(2, normed), "silu")), residual, pool[:, 0]]

    for adapters in (slots, None):
        hidden, residual = torch.zeros_like(x), x.clone()
        pool = torch.zeros(1, 2, 2, heads, 16, 64, dtype=dtype)
        layers(0, 1, hidden, residual, pool, rope, attention, adapters)
        for found, expected in zip((hidden, residual, pool[:, 0]), one_by_one(adapters), strict=True):
            assert torch.equal(found, expected)
    assert not torch.equal(one_by_one(slots)[0], one_by_one(None)[0])
