"""Gated delta nets of the GPU, in Triton's interpreter, are those in plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.state_kernels import (
    Part,
    assert_same_bits_in_chunks,
    assert_same_step,
    case_of,
    mamba_shape,
    parts,
    shape_of,
)

from splitserve.bench.kernels import triton_interpreter
from splitserve.kernels.delta_net import delta_net
from splitserve.kernels.gpu.delta_net import delta_net as gpu_delta_net
from splitserve.kernels.state_shape import NO_STATE

triton_interpreter.install()
pytestmark = [
    pytest.mark.usefixtures("guarded_memory"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]
few = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@few
@given(
    step=parts(longest=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    pool_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
    kv_heads=st.sampled_from([1, 2, 4]),
    values_of_key=st.sampled_from([1, 2, 4]),
    dim=st.sampled_from([8, 24]),
    conv_size=st.sampled_from([2, 4]),
    first=st.integers(0, 3),
)
def test_a_step(
    step: list[Part],
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    kv_heads: int,
    values_of_key: int,
    dim: int,
    conv_size: int,
    first: int,
) -> None:
    """Chunks, single tokens and padding in one batch, with and without a state before."""
    shape = shape_of(kv_heads, 1, values_of_key, dim, conv_size)
    case = case_of(shape, kv_heads, dtype, first, len(step), pool_dtype)
    assert_same_step(case, gpu_delta_net, delta_net, dtype, step)


@few
@given(
    step=parts(longest=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kv_heads=st.sampled_from([1, 2, 4]),
    num_keys=st.sampled_from([1, 2, 4]),
    values_of_each=st.integers(1, 3),
    dim=st.sampled_from([8, 24]),
    conv_size=st.sampled_from([3, 4]),
    first=st.integers(0, 3),
)
def test_a_step_of_mamba_2(
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
    assert_same_step(case, gpu_delta_net, delta_net, dtype, step)


@few
@given(
    source=st.sampled_from([NO_STATE, 0, 1]),
    length=st.integers(2, 8),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=3),
)
def test_a_token_has_the_same_bits_in_any_chunk(source: int, length: int, cuts: list[int]) -> None:
    case = case_of(shape_of(2, 1, 2, 16, 4), 2, torch.float32)
    cuts = [min(cut, length) for cut in cuts]
    assert_same_bits_in_chunks(case, gpu_delta_net, torch.float32, source, length, cuts)
