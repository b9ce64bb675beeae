"""The C++ kernels compute what the plain torch ones do, on every instruction set this machine has."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.native_kernels import DTYPES, REFERENCE, assert_close, randn, several
from torch import Tensor

from splitserve.kernels.interface import AttentionInputs, RopeInputs
from splitserve.kernels.mixture_shape import ACTIVATIONS

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
_cpu = native_cpu._cpu

HEAD_DIMS = st.sampled_from([8, 16, 24, 64, 80, 128])


def with_key_groups(pool: Tensor) -> Tensor:
    """A pool of keys and values as the C++ kernels lay it out (cpu/kv_codes.h)."""
    if pool.shape[4] % 16:
        return pool
    keys, values = pool.view(torch.int32).unbind(2)
    groups = keys.unflatten(3, (-1, 16)).transpose(4, 5).reshape(keys.shape)  # type: ignore[no-untyped-call]
    return torch.stack((groups, values), 2).view(pool.dtype)


@several
@given(rows=st.integers(1, 9), n=st.integers(1, 200), dtype=DTYPES, seed=st.integers(0, 99))
def test_add_rms_norm(
    native: native_cpu.NativeCpuKernels, rows: int, n: int, dtype: torch.dtype, seed: int
) -> None:
    x, weight = randn(rows, n, dtype=dtype, seed=seed), randn(n, dtype=dtype, seed=seed + 1)
    residual = randn(rows, n, dtype=dtype, seed=seed + 2)
    expected_residual = residual.clone()
    expected = REFERENCE.add_rms_norm(x, expected_residual, weight, 1e-5)
    assert_close(native.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert_close(residual, expected_residual)
    assert_close(native.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


@several
@given(rows=st.integers(1, 9), n=st.integers(1, 200), dtype=DTYPES, scale=st.sampled_from([1.0, 100.0]))
def test_silu_and_gelu(
    native: native_cpu.NativeCpuKernels, rows: int, n: int, dtype: torch.dtype, scale: float
) -> None:
    gate_up = randn(rows, 2 * n, dtype=dtype) * scale
    for activation in ACTIVATIONS:
        assert_close(native.gate_mul(gate_up, activation), REFERENCE.gate_mul(gate_up, activation))


@several
@given(
    data=st.data(),
    dtype=DTYPES,
    head_dim=HEAD_DIMS,
    group=st.integers(1, 4),
    num_kv_heads=st.integers(1, 3),
    norm=st.integers(0, 2),
    block_size=st.sampled_from([8, 16, 48]),
)
def test_rope_and_store(
    native: native_cpu.NativeCpuKernels,
    data: st.DataObject,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    num_kv_heads: int,
    norm: int,
    block_size: int,
) -> None:
    num_tokens = data.draw(st.integers(1, 6))
    num_heads = group * num_kv_heads
    qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    pool = torch.full((4, 2, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    expected_pool = pool.clone()
    slots = torch.tensor(
        data.draw(
            st.lists(
                st.integers(0, 4 * block_size - 1), min_size=num_tokens, max_size=num_tokens, unique=True
            )
        )
    )
    rope = RopeInputs(
        positions=torch.arange(num_tokens, dtype=torch.int32) + 3,
        slot_mapping=slots,
        cos_sin=randn(16, head_dim, dtype=torch.float32, seed=1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_norm=randn(*([num_heads] * (norm - 1)), head_dim, dtype=dtype, seed=2) if norm else None,
        k_norm=randn(*([num_kv_heads] * (norm - 1)), head_dim, dtype=dtype, seed=3) if norm else None,
        norm_eps=1e-6,
    )
    expected = REFERENCE.rope_and_store(qkv.clone(), expected_pool, 1, rope)
    assert_close(native.rope_and_store(qkv, pool, 1, rope), expected)
    expected_pool = with_key_groups(expected_pool)
    assert torch.equal(pool.isnan(), expected_pool.isnan())
    assert_close(pool.nan_to_num(), expected_pool.nan_to_num())


@several
@given(
    data=st.data(),
    dtype=DTYPES,
    head_dim=HEAD_DIMS,
    group=st.integers(1, 7),
    num_kv_heads=st.integers(1, 3),
    block_size=st.sampled_from([1, 8, 16, 24, 128]),
    window=st.none() | st.integers(1, 150),
    softcap=st.sampled_from([0.0, 0.5]),
    sinks=st.booleans(),
)
def test_paged_attention(
    native: native_cpu.NativeCpuKernels,
    data: st.DataObject,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
    softcap: float,
    sinks: bool,
) -> None:
    """Sequences of one query and of many, in one batch; slots that belong to no token are NaN, table entries
    past the end nonsense."""
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    queries = [data.draw(st.just(1) | st.integers(1, length)) for length in lengths]
    counts = [-(-length // block_size) for length in lengths]
    blocks = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).int()
    pool = torch.full((len(blocks), 2, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    tables = torch.full((len(lengths), max(counts)), -(1 << 30), dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = blocks[sum(counts[:row]) :][:count]
        for position in range(length):
            block = tables[row, position // block_size]
            pool[block, 1, :, :, position % block_size] = randn(
                2, num_kv_heads, head_dim, dtype=dtype, seed=position
            )
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    wide = randn(
        int(starts[-1]), group * num_kv_heads + 3, head_dim, dtype=dtype
    )  # q is a slice of a wider row, as in qkv
    q = wide[:, : group * num_kv_heads]
    inputs = AttentionInputs(
        starts,
        torch.tensor(lengths, dtype=torch.int32),
        tables,
        scale=head_dim**-0.5,
        sliding_window=window,
        softcap=softcap,
    )
    if sinks:
        inputs = replace(inputs, sinks=randn(len(q[0]), dtype=torch.float32, seed=5) * 3)
    exact = REFERENCE.paged_attention(q.float(), pool.float(), 1, inputs)
    assert_close(native.paged_attention(q, with_key_groups(pool), 1, inputs), exact.to(dtype))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    dtype=DTYPES,
    head_dim=HEAD_DIMS,
    group=st.integers(1, 7),
    length=st.integers(1, 300),
    block_size=st.sampled_from([1, 16, 24]),
    window=st.none() | st.integers(1, 150),
    softcap=st.sampled_from([0.0, 0.5]),
    cuts=st.lists(st.integers(1, 299), max_size=6),
    others=st.integers(0, 3),
    sinks=st.booleans(),
)
def test_attention_gives_a_row_the_same_bits_in_any_chunk_and_batch(
    native: native_cpu.NativeCpuKernels,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    length: int,
    block_size: int,
    window: int | None,
    softcap: float,
    cuts: list[int],
    others: int,
    sinks: bool,
) -> None:
    """Whole, in chunks, token by token: so prefill and decode agree, whatever was cached."""
    num_blocks = -(-length // block_size)
    pool = randn(num_blocks, 1, 2, 2, block_size, head_dim, dtype=dtype) * 3
    q = randn(length, 2 * group, head_dim, dtype=dtype, seed=1) * 3
    tables = torch.randperm(num_blocks).int()[None]

    def run(start: int, stop: int) -> Tensor:
        """The rows [start, stop), beside ``others`` sequences of one query each."""
        rows = torch.cat((q[:others], q[start:stop]))
        starts = torch.tensor([*range(others + 1), others + stop - start], dtype=torch.int32)
        lengths = torch.tensor([min(7, length)] * others + [stop], dtype=torch.int32)
        inputs = AttentionInputs(
            starts, lengths, tables.repeat(others + 1, 1), head_dim**-0.5, window, softcap,
            sinks=torch.linspace(-2, 2, rows.shape[1]) if sinks else None,
        )  # fmt: skip
        return native.paged_attention(rows, pool, 0, inputs)[others:]

    others = min(others, length)
    whole = run(0, length)
    edges = sorted({0, length, *(c for c in cuts if c < length)})
    for start, stop in itertools.pairwise(edges):
        assert torch.equal(run(start, stop), whole[start:stop])
    for row in {0, length // 2, length - 1}:
        assert torch.equal(run(row, row + 1), whole[row : row + 1])


def test_gumbel_argmax(native: native_cpu.NativeCpuKernels) -> None:
    logits = randn(40, 1003, dtype=torch.float32) * 2
    logits[1, 7:] = -torch.inf
    keys = torch.randint(0, 2**32, (40, 2), generator=torch.Generator().manual_seed(5))
    assert torch.equal(native.gumbel_argmax(logits, keys), REFERENCE.gumbel_argmax(logits, keys))
