"""Short convolutions of the GPU, in Triton's interpreter, are those in plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.state_kernels import Part, assert_same_bits_in_chunks, assert_same_step, case_of, parts

from splitserve.bench.kernels import triton_interpreter
from splitserve.kernels.gpu.short_conv import short_conv as gpu_short_conv
from splitserve.kernels.short_conv import ShortConvShape, short_conv
from splitserve.kernels.state_shape import NO_STATE

triton_interpreter.install()
pytestmark = [pytest.mark.usefixtures("guarded_memory")]
few = settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@few
@given(
    step=parts(longest=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    pool_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kv_heads=st.sampled_from([1, 2]),
    channels=st.sampled_from([8, 24, 160]),
    conv_size=st.integers(2, 4),
    first=st.integers(0, 3),
)
def test_a_step(
    step: list[Part],
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    kv_heads: int,
    channels: int,
    conv_size: int,
    first: int,
) -> None:
    """Chunks, single tokens and padding in one batch, with and without a state before."""
    case = case_of(
        ShortConvShape(kv_heads * channels, conv_size), kv_heads, dtype, first, len(step), pool_dtype
    )
    assert_same_step(case, gpu_short_conv, short_conv, dtype, step)


@few
@given(
    source=st.sampled_from([NO_STATE, 0, 1]),
    length=st.integers(2, 8),
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=3),
)
def test_a_token_has_the_same_bits_in_any_chunk(source: int, length: int, cuts: list[int]) -> None:
    case = case_of(ShortConvShape(32, 3), 2, torch.float32)
    cuts = [min(cut, length) for cut in cuts]
    assert_same_bits_in_chunks(case, gpu_short_conv, torch.float32, source, length, cuts)
