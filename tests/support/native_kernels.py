"""What the tests of the C++ kernels share."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from splitserve.kernels.reference import TorchKernels

REFERENCE = TorchKernels()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
several = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def assert_close(found: Tensor, expected: Tensor, scale: Tensor | None = None) -> None:
    """Relative to the largest value (or to `scale`, where a sum's terms may cancel): float32 differs by the
    order of sums, bfloat16 by its last bit or two."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    allowed = 2e-5 if found.dtype == torch.float32 else 2e-2
    assert (found.float() - expected.float()).abs().max() <= allowed * (
        expected if scale is None else scale
    ).float().abs().max() + 1e-30


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
