"""Gated delta nets in C++ are those in plain torch, on every instruction set this machine has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.native_kernels import DTYPES, REFERENCE, several
from support.state_kernels import (
    Part,
    assert_same_bits_in_chunks,
    assert_same_step,
    case_of,
    mamba_shape,
    parts,
    shape_of,
)

from splitserve.kernels.state_shape import NO_STATE

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
_cpu = native_cpu._cpu


@several
@given(
    step=parts(longest=150),
    dtype=DTYPES,
    pool_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]),
    kv_heads=st.sampled_from([1, 2, 4]),
    keys_of_each=st.integers(1, 2),
    values_of_key=st.sampled_from([1, 2, 4]),
    dim=st.sampled_from([4, 8, 24, 32]),
    conv_size=st.integers(2, 4),
    first=st.integers(0, 3),
)
def test_a_step(
    native: native_cpu.NativeCpuKernels,
    step: list[Part],
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    kv_heads: int,
    keys_of_each: int,
    values_of_key: int,
    dim: int,
    conv_size: int,
    first: int,
) -> None:
    """Chunks, single tokens and padding in one batch, with and without a state before."""
    shape = shape_of(kv_heads, keys_of_each, values_of_key, dim, conv_size)
    case = case_of(shape, kv_heads, dtype, first, len(step), pool_dtype)
    assert_same_step(case, native.delta_net, REFERENCE.delta_net, dtype, step)


@several
@given(
    step=parts(longest=150),
    dtype=DTYPES,
    kv_heads=st.sampled_from([1, 2, 4]),
    num_keys=st.sampled_from([1, 2, 4, 8]),
    values_of_each=st.integers(1, 3),
    dim=st.sampled_from([4, 8, 24, 32]),
    conv_size=st.integers(2, 4),
    first=st.integers(0, 3),
)
def test_a_step_of_mamba_2(
    native: native_cpu.NativeCpuKernels,
    step: list[Part],
    dtype: torch.dtype,
    kv_heads: int,
    num_keys: int,
    values_of_each: int,
    dim: int,
    conv_size: int,
    first: int,
) -> None:
    """Also where several key-value heads have one key head."""
    shape = mamba_shape(kv_heads, num_keys, values_of_each, dim, conv_size)
    case = case_of(shape, kv_heads, dtype, first, len(step))
    assert_same_step(case, native.delta_net, REFERENCE.delta_net, dtype, step)


@several
@given(
    dtype=DTYPES,
    dim=st.sampled_from([8, 24, 128]),
    source=st.sampled_from([NO_STATE, 0, 1]),
    length=st.integers(2, 150),
    cuts=st.lists(st.integers(1, 149), min_size=1, max_size=5),
    single=st.booleans(),
    mamba=st.booleans(),
)
def test_a_token_has_the_same_bits_in_any_chunk(
    native: native_cpu.NativeCpuKernels,
    dtype: torch.dtype,
    dim: int,
    source: int,
    length: int,
    cuts: list[int],
    single: bool,
    mamba: bool,
) -> None:
    """``single``: one token after the other."""
    shape = mamba_shape(2, 1, 3, dim, 4) if mamba else shape_of(2, 1, 2, dim, 4)
    case = case_of(shape, 2, dtype)
    cuts = [min(cut, length) for cut in cuts] + (list(range(length)) if single else [])
    assert_same_bits_in_chunks(case, native.delta_net, dtype, source, length, cuts)


def test_a_pool_may_be_a_view_of_some_heads(native: native_cpu.NativeCpuKernels) -> None:
    case = case_of(shape_of(2, 1, 2, 8, 4), 2, torch.bfloat16, 1, 2, torch.float32)
    wide = torch.zeros((*case.pool.shape[:3], 5, *case.pool.shape[4:]))
    view = wide[:, :, :, 1:5:2]
    step, projected = [Part(1, 0, 1), Part(4, NO_STATE)], case.projected(5, torch.bfloat16)
    view.copy_(case.pool)
    found, expected = (case.run(native.delta_net, projected, pool, step) for pool in (view, case.pool))
    assert torch.equal(found, expected)
    assert torch.equal(view, case.pool)
    assert not wide[:, :, :, ::2].any()


def test_threads_share_a_step(native: native_cpu.NativeCpuKernels) -> None:
    step = [Part(1, 0), Part(70, 1, 33), Part(1, NO_STATE)]
    case = case_of(shape_of(2, 2, 2, 64, 4), 2, torch.float32, num_seqs=len(step))
    try:
        _cpu.set_num_threads(3)
        assert_same_step(case, native.delta_net, REFERENCE.delta_net, torch.float32, step)
    finally:
        _cpu.set_num_threads(1)


def test_value_heads_that_no_vector_divides_are_refused(native: native_cpu.NativeCpuKernels) -> None:
    case = case_of(shape_of(1, 1, 1, 6, 4), 1, torch.float32)
    with pytest.raises(ValueError, match="value heads of 6 numbers have no C"):
        case.run(native.delta_net, case.projected(1, torch.float32), case.pool, [Part(1)])
