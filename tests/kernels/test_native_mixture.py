"""A mixture of experts in C++ is that in plain torch, on every instruction set this machine has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.mixture_parts import summed_parts
from torch import Tensor

from splitserve.bench.kernels.kernel_inputs import mixture_weights, quarters, relative_error
from splitserve.kernels.mixture_shape import ACTIVATIONS, Activation, MixtureShape
from splitserve.kernels.mixture_weights import ExpertWeights, MixtureWeights
from splitserve.kernels.quantised import Scheme, Weight, parts_of, quantise
from splitserve.kernels.reference import TorchKernels

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
REFERENCE = TorchKernels()
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    m=st.sampled_from([1, 2, 5, 33, 400]),
    sizes=st.sampled_from([(24, 16), (17, 9), (64, 40)]),
    experts=st.sampled_from([(1, 1), (5, 2), (9, 9), (40, 3)]),
    shared=st.sampled_from([0, 20]),
    normalized=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_mixture(
    native: native_cpu.NativeCpuKernels,
    m: int,
    sizes: tuple[int, int],
    experts: tuple[int, int],
    shared: int,
    normalized: bool,
    activation: Activation,
    dtype: torch.dtype,
) -> None:
    """Its routes and sums; a row's bits are those of the row alone."""
    shape = MixtureShape(*experts, *sizes, normalized, activation, shared)
    weights = mixture_weights(shape, dtype, biases=not shared)
    x, own = quarters(m, sizes[0], dtype=dtype), native.mixture(weights)
    together = own(x)
    assert relative_error(together, REFERENCE.mixture(weights)(x)) < ALLOWED[dtype]
    for row in {0, m // 2, m - 1}:
        assert torch.equal(own(x[row : row + 1].clone()), together[row : row + 1])


FORMS: dict[str, Callable[[Tensor], Weight]] = {
    "int8": lambda weight: quantise(weight, "int8"),
    "int8 with rounded inputs": lambda weight: replace(quantise(weight, "int8"), rounds_x=True),
    "int4": lambda weight: quantise(weight, "int4"),
    "float8": lambda weight: quantise(weight, "fp8"),
    "float4": lambda weight: replace(
        quantise(weight, "int4"),
        scales=torch.full((len(weight), -(-weight.shape[1] // 32)), 2.0**-5),
        float4=True,
    ),
}


def in_form(
    weights: MixtureWeights, write: Callable[[Tensor], Weight], plain_gate: int | None = None
) -> MixtureWeights:
    """``weights`` with gate, up and down of each expert quantised, but not the gate of ``plain_gate``."""

    def expert(i: int) -> ExpertWeights:
        (gate, up), down = parts_of(weights.expert(i).gate_up), weights.expert(i).down
        assert isinstance(gate, Tensor)
        assert isinstance(up, Tensor)
        assert isinstance(down, Tensor)
        return ExpertWeights([gate if i == plain_gate else write(gate), write(up)], write(down))

    return replace(weights, expert=expert)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_mixture_of_quantised_experts(
    native: native_cpu.NativeCpuKernels, form: str, dtype: torch.dtype
) -> None:
    """A row's bits are those of the row alone, with one thread and with two."""
    shape = MixtureShape(7, 3, 96, 40, True, "clamped_silu", 20)
    weights = in_form(mixture_weights(shape, dtype), FORMS[form], plain_gate=2)
    x, own = quarters(40, 96, dtype=dtype), native.mixture(weights)
    together = own(x)
    most = 3e-2 if "rounded" in form else 2e-4 + ALLOWED[dtype]  # inputs are rounded to 8 bits, or to 16
    assert relative_error(together, REFERENCE.mixture(weights)(x)) < most
    for row in (0, 17, 39):
        assert torch.equal(own(x[row : row + 1].clone()), together[row : row + 1])
    native_cpu._cpu.set_num_threads(2)
    assert torch.equal(own(x), together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("m", "shared"), [(1, 0), (30, 20)])
def test_parts_of_the_experts_add_up(
    native: native_cpu.NativeCpuKernels, m: int, shared: int, dtype: torch.dtype
) -> None:
    """Biases among them."""
    weights = mixture_weights(MixtureShape(9, 2, 24, 16, True, "silu", shared), dtype, biases=not shared)
    x, parts = quarters(m, 24, dtype=dtype), (range(3), range(3, 7), range(7, 9))
    found, expected = summed_parts(native, weights, x, parts), REFERENCE.mixture(weights)(x)
    assert relative_error(found, expected) < ALLOWED[dtype]
    assert relative_error(summed_parts(REFERENCE, weights, x, parts), expected) < ALLOWED[dtype]


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_experts_are_quantised_at_load_but_the_router_is_not(
    native: native_cpu.NativeCpuKernels, scheme: Scheme
) -> None:
    weights = mixture_weights(MixtureShape(5, 2, 64, 40, True, "silu", 24), torch.float32)
    native._quantization = scheme
    x = quarters(9, 64, dtype=torch.float32)

    quantised = in_form(weights, lambda weight: quantise(weight, scheme))
    expected = REFERENCE.mixture(quantised)(x)
    assert relative_error(native.mixture(weights)(x), expected) < 2e-4


def test_experts_with_equal_logits_are_taken_by_their_numbers(native: native_cpu.NativeCpuKernels) -> None:
    shape = MixtureShape(6, 2, 8, 8, False, "silu")
    weights = mixture_weights(shape, torch.float32)
    router = torch.tensor([0.0, 1.0, 3.0, 1.0, 1.0, 0.0])[:, None].expand(6, 8).contiguous()
    x, expected = torch.ones(1, 8), torch.zeros(1, 8)
    share = (router @ x.T).squeeze().softmax(0)
    for i in (1, 2):
        expert = weights.expert(i)
        gate, up = (x @ matrix.T for matrix in expert.gate_up)
        expected += share[i] * (torch.nn.functional.silu(gate) * up @ expert.down.T)
    tied = replace(weights, router=router)
    for kernels in (native, REFERENCE):
        assert relative_error(kernels.mixture(tied)(x), expected) < ALLOWED[torch.float32]
