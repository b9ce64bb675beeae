"""The index of sparse attention chooses the same tokens in C++ as in torch, also of equal scores and in any
batch; attention to single tokens is attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.native_kernels import REFERENCE, assert_close
from torch import Tensor

from splitserve.bench.kernels.kernel_inputs import LAYER, AttentionCase, attention_case, quarters
from splitserve.kernels.native_cpu import NativeCpuKernels
from splitserve.kernels.sparse_index import largest

pytestmark = pytest.mark.usefixtures("guarded_memory")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def case_of(
    lengths: list[int], queries: list[int], heads: int, head_dim: int, block_size: int
) -> AttentionCase:
    """Keys in quarters: scores are exact, and many are equal."""
    case = attention_case(
        lengths, queries, group=heads, num_kv_heads=1, head_dim=head_dim, block_size=block_size
    )
    pool = (case.pool[:, :, :1] * 2).round().float() / 2
    return replace(case, pool=pool, q=quarters(*case.q.shape, dtype=torch.float32))


def part_of(pool: Tensor, first: int) -> Tensor:
    """The same pool as a part of the blocks of a wider one, as latent vectors and index keys lie."""
    blocks, layers, _, _, block_size, size = pool.shape
    row = size + 40
    wide = torch.full((blocks, layers, 1, 1, block_size, row), torch.nan, dtype=pool.dtype)
    strides = (*wide.stride()[:3], block_size * size, size, 1)
    view = wide.as_strided(pool.shape, strides, block_size * first)
    view.copy_(pool)
    return view


@DTYPES
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [(1, 8, 4), (5, 24, 16), (64, 128, 16)])
def test_the_same_tokens_are_chosen(
    native: NativeCpuKernels, dtype: torch.dtype, heads: int, head_dim: int, block_size: int
) -> None:
    case = case_of([2100, 21, 65], [3, 9, 1], heads, head_dim, block_size)
    q, pool = case.q.to(dtype), part_of(case.pool.to(dtype), 40)
    weights = quarters(len(q), heads, dtype=torch.float32, seed=5)
    found = native.index_slots(q, weights, pool, LAYER, case.inputs, 12)
    assert torch.equal(found, REFERENCE.index_slots(q, weights, pool, LAYER, case.inputs, 12))
    for row, (seq, length) in {2: (0, 2100), 11: (1, 21), 12: (2, 65)}.items():
        alone = replace(
            case.inputs,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            block_tables=case.inputs.block_tables[seq : seq + 1].contiguous(),
        )
        own = native.index_slots(q[row : row + 1], weights[row : row + 1], pool, LAYER, alone, 12)
        assert torch.equal(own[0], found[row])


def test_of_equal_scores_the_first_are_chosen() -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 1.0, 3.0, 1.0], [0.0, -0.0, 0.0, 0.0, -1.0, 0.0]])
    assert largest(scores, 4).tolist() == [[0, 1, 2, 4], [0, 1, 2, 3]]
    scores[0] = torch.nan
    assert largest(scores, 4).tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


@DTYPES
def test_attention_to_single_tokens(native: NativeCpuKernels, dtype: torch.dtype) -> None:
    """In the order of positions, to all tokens: with the bits of attention to blocks."""
    case = case_of([150, 90], [1, 1], 20, 48, 16)
    q, pool = case.q.to(dtype), part_of(case.pool.to(dtype), 0)
    slots = case.inputs.block_tables[:, :, None].clamp(max=len(pool) - 1) * 16 + torch.arange(16)
    single = replace(case.inputs, block_tables=slots.flatten(1).int().contiguous(), slots=True)
    whole = native.paged_attention(q, pool, LAYER, case.inputs)
    assert torch.equal(native.paged_attention(q, pool, LAYER, single), whole)
    some = replace(single, block_tables=single.block_tables[:, 3:83:2].contiguous())
    some = replace(some, seq_lens=torch.tensor([40, 7], dtype=torch.int32))
    expected = REFERENCE.paged_attention(q, pool, LAYER, some)
    assert_close(native.paged_attention(q, pool, LAYER, some), expected)


def test_more_tokens_than_are_scored_at_once(native: NativeCpuKernels) -> None:
    case = case_of([2100], [2050], 1, 8, 16)
    weights = quarters(2050, 1, dtype=torch.float32, seed=5)
    found = native.index_slots(case.q, weights, case.pool, LAYER, case.inputs, 12)
    assert torch.equal(found, REFERENCE.index_slots(case.q, weights, case.pool, LAYER, case.inputs, 12))
