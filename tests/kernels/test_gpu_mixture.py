"""The GPU's mixture of experts, in Triton's interpreter, is that in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.mixture_parts import summed_parts

from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.kernel_inputs import (
    QUANTISED,
    mixture_weights,
    quantised_weight,
    quarters,
    relative_error,
)
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu.mixture import plan_tiles
from splitserve.kernels.gpu.quantised_experts import QuantisedExperts
from splitserve.kernels.interface import joined
from splitserve.kernels.mixture_shape import ACTIVATIONS, Activation, MixtureShape
from splitserve.kernels.mixture_weights import ExpertWeights
from splitserve.kernels.quantised import QuantisedWeight, Scheme, quantise
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


@pytest.mark.parametrize(("form", "exact"), [("", True), ("", False), ("W8A8", True), ("MXFP4", True)])
def test_parts_of_the_experts_add_up(form: str, exact: bool) -> None:
    shape = MixtureShape(7, 2, 64, 32, True, "clamped_silu", 0 if form else 24)
    weights = mixture_weights(shape, torch.float32, biases=bool(form))
    if form:
        weights = replace(weights, expert=lambda i: quantised_expert(shape, QUANTISED[form], i))
    x, parts = quarters(9, 64, dtype=torch.float32), (range(3), range(3, 5), range(5, 7))
    found = summed_parts(CudaKernels(1, exact), weights, x, parts)
    assert relative_error(found, TorchKernels().mixture(weights)(x)) < 2e-5


def quantised_expert(
    shape: MixtureShape, how: dict[str, Any], i: int, up_seed: int | None = None
) -> ExpertWeights:
    """Its numbers keep activations small."""

    def matrix(rows: int, columns: int, seed: int) -> QuantisedWeight:
        weight = quantised_weight(rows, columns, **how, seed=seed)
        small = None if weight.minimums is None else weight.minimums / 2**weight.bits
        return replace(weight, scales=weight.scales / 2**weight.bits, minimums=small)

    size, hidden = shape.intermediate_size, shape.hidden_size
    gate_up = [matrix(size, hidden, i), matrix(size, hidden, i if up_seed is None else up_seed)]
    return ExpertWeights(gate_up, matrix(hidden, size, 90 + i))


def test_tiles_cover_each_experts_rows() -> None:
    experts = torch.tensor([[0, 3], [3, 4], [0, 3], [0, 3]], dtype=torch.int32)
    tiles = plan_tiles(experts, 6, rows=2)
    assert tiles.starts.tolist() == [0, 3, 3, 3, 7, 8, 8]
    assert tiles.ends.tolist() == [2, 2, 2, 4, 5, 5]
    assert experts.flatten()[tiles.order].tolist() == [0, 0, 0, 3, 3, 3, 3, 4]


@pytest.mark.parametrize(
    ("form", "m", "dtype", "alike"),
    [
        *((form, 2, torch.float16, True) for form in QUANTISED),
        ("GPTQ of 4 bits", 20, torch.float32, True),
        ("GPTQ of 4 bits", 3, torch.float32, False),
    ],
)
def test_experts_in_a_quantised_form(form: str, m: int, dtype: torch.dtype, alike: bool) -> None:
    """Beside plain torch with the same codes; a row's bits are those of the row alone. ``alike``: gate and
    up are in one act-order; otherwise they are dequantised."""
    shape = MixtureShape(3, 2, 32, 24, normalized=True, activation="silu")
    wide, how = mixture_weights(shape, dtype, biases=True), dict(QUANTISED[form])
    how |= {"group": 16} if how.get("group") else {}

    def expert(i: int) -> ExpertWeights:
        return quantised_expert(shape, how, i, None if alike else 50 + i)

    weights = replace(wide, expert=expert)
    x, own = quarters(m, 32, dtype=dtype), CudaKernels(1, exact=True).mixture(weights)
    assert isinstance(own._down, QuantisedExperts) == alike
    together = own(x)
    assert relative_error(together, TorchKernels().mixture(weights)(x)) < 2 * ALLOWED[dtype]
    assert torch.equal(own(x[m // 2 : m // 2 + 1].clone())[0], together[m // 2])


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_experts_quantised_at_load(scheme: Scheme) -> None:
    shape = MixtureShape(5, 2, 64, 32, normalized=True, activation="silu", shared_size=24)
    weights, x = mixture_weights(shape, torch.float32), quarters(7, 64, dtype=torch.float32)

    def expert(i: int) -> ExpertWeights:
        of = weights.expert(i)
        return ExpertWeights(quantise(joined(of.gate_up), scheme), quantise(joined(of.down), scheme))

    expected = TorchKernels().mixture(replace(weights, expert=expert))(x)
    assert relative_error(CudaKernels(1, exact=True, scheme=scheme).mixture(weights)(x), expected) < 1e-5
