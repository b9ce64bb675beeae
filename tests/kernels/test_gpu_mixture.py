"""The GPU's mixture of experts, in Triton's interpreter, is that in plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.kernel_inputs import mixture_weights, quarters, relative_error
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu.mixture import plan_tiles
from splitserve.kernels.mixture_shape import ACTIVATIONS, Activation, MixtureShape
from splitserve.kernels.reference import TorchKernels

triton_interpreter.install()
pytestmark = pytest.mark.usefixtures("guarded_memory")
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3}


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    m=st.sampled_from([1, 3, 20]),
    sizes=st.sampled_from([(32, 16), (72, 40)]),
    experts=st.sampled_from([(1, 1), (5, 2), (9, 4)]),
    shared=st.sampled_from([0, 24]),
    normalized=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    exact=st.booleans(),
)
def test_mixture(
    m: int,
    sizes: tuple[int, int],
    experts: tuple[int, int],
    shared: int,
    normalized: bool,
    activation: Activation,
    dtype: torch.dtype,
    exact: bool,
) -> None:
    """A row's bits, exact, are those of the row alone."""
    shape = MixtureShape(*experts, *sizes, normalized, activation, shared)
    weights = mixture_weights(shape, dtype, biases=not shared)
    x, own = quarters(m, sizes[0], dtype=dtype), CudaKernels(1, exact).mixture(weights)
    together = own(x)
    assert relative_error(together, TorchKernels().mixture(weights)(x)) < ALLOWED[dtype]
    if exact:
        assert torch.equal(own(x[m // 2 : m // 2 + 1].clone())[0], together[m // 2])


def test_tiles_cover_each_experts_rows() -> None:
    experts = torch.tensor([[0, 3], [3, 4], [0, 3], [0, 3]], dtype=torch.int32)
    tiles = plan_tiles(experts, 6, rows=2)
    assert tiles.starts.tolist() == [0, 3, 3, 3, 7, 8, 8]
    assert tiles.ends.tolist() == [2, 2, 2, 4, 5, 5]
    assert experts.flatten()[tiles.order].tolist() == [0, 0, 0, 3, 3, 3, 3, 4]
