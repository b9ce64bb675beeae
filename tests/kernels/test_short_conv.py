"""Short convolutions: plain torch against torch's own convolution, and C++ against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.native_kernels import DTYPES, REFERENCE, several
from support.state_kernels import Part, assert_same_bits_in_chunks, assert_same_step, case_of, parts
from torch.nn.functional import conv1d, pad

from splitserve.kernels.short_conv import ShortConvShape, ShortConvWeights, short_conv
from splitserve.kernels.state_shape import NO_STATE
from splitserve.kernels.states import read_state

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)


def test_a_prompt_is_that_of_a_convolution() -> None:
    shape = ShortConvShape(64, 3)
    case = case_of(shape, 2, torch.float32)
    projected, weights = case.projected(9, torch.float32), case.weights
    assert isinstance(weights, ShortConvWeights)
    b, c, x = projected.chunk(3, dim=1)
    taps = weights.conv.t()[:, None]
    expected = c * conv1d(pad((b * x).t(), (2, 0))[None], taps, weights.bias, groups=64)[0].t()
    found = case.run(short_conv, projected, case.pool, [Part(9)])
    assert torch.allclose(found, expected, atol=1e-6)
    state = read_state(case.pool, case.place, case.inputs([Part(9)]).tables[0, 0].long(), shape)
    assert torch.equal(state.view(2, 2, 32), (b * x)[-2:].view(2, 2, 32).movedim(1, 0))


@several
@given(
    step=parts(longest=12),
    dtype=DTYPES,
    pool_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kv_heads=st.sampled_from([1, 2]),
    channels=st.sampled_from([16, 36, 48]),
    conv_size=st.integers(2, 4),
    first=st.integers(0, 3),
)
def test_a_step(
    native: native_cpu.NativeCpuKernels,
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
    assert_same_step(case, native.short_conv, REFERENCE.short_conv, dtype, step)


@several
@given(
    dtype=DTYPES,
    source=st.sampled_from([NO_STATE, 0, 1]),
    length=st.integers(2, 20),
    cuts=st.lists(st.integers(1, 19), min_size=1, max_size=5),
)
def test_a_token_has_the_same_bits_in_any_chunk(
    native: native_cpu.NativeCpuKernels, dtype: torch.dtype, source: int, length: int, cuts: list[int]
) -> None:
    case = case_of(ShortConvShape(96, 4), 2, dtype)
    cuts = [min(cut, length) for cut in cuts]
    assert_same_bits_in_chunks(case, native.short_conv, dtype, source, length, cuts)


def test_channels_that_no_vector_divides_are_refused(native: native_cpu.NativeCpuKernels) -> None:
    case = case_of(ShortConvShape(12, 3), 2, torch.float32)
    with pytest.raises(ValueError, match="12 channels beside 2 key-value heads have no C"):
        case.run(native.short_conv, case.projected(1, torch.float32), case.pool, [Part(1)])
