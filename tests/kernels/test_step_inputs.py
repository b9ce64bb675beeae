"""The kernel that derives a step's inputs from the step before, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from splitserve.bench.kernels import triton_interpreter
from splitserve.kernels.gpu.step_inputs import HEADER, advance

triton_interpreter.install()
pytestmark = [pytest.mark.usefixtures("guarded_memory")]

MAX_BLOCKS, BLOCK_SIZE = 400, 8


@pytest.mark.parametrize("num_rows", [1, 4, 24])
@pytest.mark.parametrize("follows", [True, False])
def test_rows_move_grow_and_join(num_rows: int, follows: bool) -> None:
    """``accepted`` tokens of a row count, as many as a draft may have; more entries change than are read at
    once."""
    random = np.random.default_rng(num_rows)
    n = max(1, num_rows - 2)

    def ints(*values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.atleast_1d(v).astype(np.int32).ravel() for v in values]))

    before, accepted = random.integers(1, 3000, num_rows), random.integers(1, 5, num_rows)
    sampled, tokens, lengths = (random.integers(1, 3000, num_rows) for _ in range(3))
    fed_from = random.permutation(num_rows)[:n]
    fed_from[random.random(n) < 0.3] = -1
    old, new = (random.integers(0, 1 << 20, (num_rows, MAX_BLOCKS)) for _ in range(2))
    tables = np.where(random.random(old.shape) < 0.2, new, old)
    at = (tables != old).ravel().nonzero()[0]
    assert num_rows == 1 or len(at) > 512 or num_rows < 24
    packed = torch.full((HEADER + 3 * num_rows + 2 * tables.size,), -7, dtype=torch.int32)
    columns = np.full((3, num_rows), 99)
    columns[:, :n] = tokens[:n], fed_from, lengths[:n]
    words = ints(np.array([n, len(at), follows, 0]), columns, np.stack([at, tables.ravel()[at]], axis=1))
    packed[: len(words)] = words
    token_ids, positions = (torch.empty(num_rows, dtype=torch.int32) for _ in range(2))
    seq_lens, slots = ints(before), torch.empty(num_rows, dtype=torch.int64)
    on_device = ints(old).view(num_rows, MAX_BLOCKS)
    advance(
        packed, ints(sampled), ints(accepted), token_ids, positions, seq_lens, slots,
        on_device, num_rows, BLOCK_SIZE
    )  # fmt: skip
    is_fed = fed_from >= 0
    expected = np.where(is_fed & follows, (before + accepted)[fed_from], lengths[:n])
    at_block = tables[np.arange(n), (expected - 1) // BLOCK_SIZE]
    assert on_device.tolist() == tables.tolist()
    assert token_ids[:n].tolist() == np.where(is_fed, sampled[fed_from], tokens[:n]).tolist()
    assert seq_lens.tolist() == [*expected.tolist(), *[0] * (num_rows - n)]
    assert positions[:n].tolist() == (expected - 1).tolist()
    assert slots.tolist() == [
        *(at_block * BLOCK_SIZE + (expected - 1) % BLOCK_SIZE).tolist(),
        *[-1] * (num_rows - n),
    ]
