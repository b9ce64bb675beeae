"""Low-rank updates on GPUs, in Triton's interpreter, are those in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.kernel_inputs import randn, relative_error
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu import low_rank
from splitserve.kernels.low_rank import TorchLowRank

triton_interpreter.install()
pytestmark = pytest.mark.usefixtures("guarded_memory")
few = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
RANKS = (1, 8, 16, 48, 64)
ALLOWED = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
CPU = torch.device("cpu")


def filled(updates: Any, k: int, n: int, ranks: tuple[int, ...] = RANKS) -> Any:
    for slot, rank in enumerate(ranks):
        updates.put(slot, randn(rank, k, seed=slot), randn(n, rank, seed=99 + slot) / 8)
    return updates


def added(updates: Any, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
    result = out.clone()
    updates.add(result, x, slots)
    return result


@few
@given(
    slots=st.lists(st.integers(-2, len(RANKS)), min_size=1, max_size=40),
    k=st.sampled_from([16, 100, 1500]),
    n=st.sampled_from([17, 40, 300]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    few_rows=st.sampled_from([0, 256]),
)
def test_each_row_gets_the_update_of_its_slot(
    slots: list[int], k: int, n: int, dtype: torch.dtype, few_rows: int
) -> None:
    row_slots = torch.tensor(slots, dtype=torch.int32)
    out, x = randn(len(slots), n, dtype=dtype, seed=7), randn(len(slots), k, dtype=dtype, seed=8) / k**0.5
    own = filled(CudaKernels(1).low_rank(k, n, 64, len(RANKS) + 1, dtype, CPU), k, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_rank, "FEW_ROWS", few_rows)
        found = added(own, out, x, row_slots)
    exact = TorchLowRank()
    for slot, rank in enumerate(RANKS):  # rounded as the memory is
        exact.put(slot, own._a[slot, :rank], own._b[slot, :, :rank])
    assert relative_error(found, added(exact, out.double(), x.double(), row_slots)) < ALLOWED[dtype]
    without = (row_slots < 0) | (row_slots == len(RANKS))  # the last slot is empty
    assert torch.equal(found[without], out[without])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "FEW_ROWS", 34)
    monkeypatch.setattr(low_rank, "SPLIT", 128)
    m, k, n = 40, 300, 150
    updates = filled(CudaKernels(1).low_rank(k, n, 64, len(RANKS), dtype, CPU), k, n)
    out, x = randn(m, n, dtype=dtype, seed=7), randn(m, k, dtype=dtype, seed=8)
    slots = torch.tensor([*range(-1, 5)] * 5 + [4] * 10, dtype=torch.int32)
    together = added(updates, out, x, slots)
    for rows in (slice(0, 1), slice(3, 4), slice(5, 40), slice(30, 40), slice(1, 31)):
        assert torch.equal(added(updates, out[rows], x[rows], slots[rows]), together[rows])


def test_a_slot_that_is_cleared_adds_nothing_and_takes_another_rank() -> None:
    k, n = 70, 50
    out, x = randn(6, n, seed=7), randn(6, k, seed=8)
    slots = torch.tensor([0, 1, 0, -1, 1, 1], dtype=torch.int32)
    updates = filled(CudaKernels(1).low_rank(k, n, 64, 2, torch.float32, CPU), k, n, (48, 16))
    before = added(updates, out, x, slots)
    updates.clear(0)
    cleared = added(updates, out, x, slots)
    assert torch.equal(cleared[slots != 1], out[slots != 1])
    assert torch.equal(cleared[slots == 1], before[slots == 1])
    for rank in (64, 8):
        exact = TorchLowRank()
        for each in (updates, exact):
            each.put(0, randn(rank, k), randn(n, rank, seed=1))
        rows = slots == 0
        expected = added(exact, out, x, slots)[rows]
        assert relative_error(added(updates, out, x, slots)[rows], expected) < 1e-6


def test_blocks_of_a_block_diagonal_are_found() -> None:
    parts = (512, 256, 256)
    b = torch.block_diag(*(randn(n, 16) for n in parts))  # type: ignore[no-untyped-call]
    updates = CudaKernels(1).low_rank(64, sum(parts), 48, 1, torch.float32, CPU)
    updates.put(0, randn(48, 64), b)
    assert updates._bounds[0].tolist() == [[0, 3], *[[0, 1]] * 4, *[[1, 2]] * 2, *[[2, 3]] * 2]
