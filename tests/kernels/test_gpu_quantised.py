"""The GPU's linear layers of quantised weights, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.kernel_inputs import QUANTISED, quantised_weight, randn, relative_error
from splitserve.engine.engine_config import WARM_UP_TOKENS
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu import quantised_linear
from splitserve.kernels.gpu.exact_linear import product_tile
from splitserve.kernels.gpu.quantised_linear import QuantisedLinear, quantised_tile, round_rows
from splitserve.kernels.quantised import Scheme, quantise, rounded_rows
from splitserve.kernels.reference import TorchKernels

triton_interpreter.install()
pytestmark = pytest.mark.usefixtures("guarded_memory")
ALLOWED = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
REFERENCE = TorchKernels()


@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    m=st.sampled_from([1, 3, 17, 70]),
    n=st.sampled_from([1, 70]),
    k=st.sampled_from([256, 200]),
    dtype=st.sampled_from(list(ALLOWED)),
    bias=st.booleans(),
    num_sms=st.sampled_from([1, 8]),
)
@pytest.mark.parametrize("form", QUANTISED)
def test_it_is_the_product_with_the_dequantised_weights(
    form: str, m: int, n: int, k: int, dtype: torch.dtype, bias: bool, num_sms: int
) -> None:
    weight = quantised_weight(n, k, **QUANTISED[form])
    x, offset = randn(m, k, dtype=dtype), randn(n, dtype=dtype, seed=2)
    wide = rounded_rows(x) if weight.rounds_x else x
    expected = wide.double() @ weight.dequantised().double().t() + (offset.double() if bias else 0)
    linear = QuantisedLinear(weight, offset if bias else None, num_sms)
    assert relative_error(linear(x), expected) < ALLOWED[dtype]


@pytest.mark.parametrize("form", ["int4", "float8 in blocks", "W8A8"])
def test_the_parts_of_a_sum_are_added_in_their_order(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, for the counts of arrived programs must be zero again."""
    monkeypatch.setattr(quantised_linear, "LEAST_STEPS", 1)
    weight, x = quantised_weight(70, 900, **QUANTISED[form]), randn(3, 900, dtype=torch.bfloat16)
    linear = QuantisedLinear(weight, None, num_sms=16)
    assert linear._splits > 3
    expected = REFERENCE.linear(weight, None)(x.float())
    first = linear(x)
    assert relative_error(first, expected) < ALLOWED[torch.bfloat16]
    assert torch.equal(linear(x), first)
    assert not linear._arrived.any()


def test_every_size_of_a_tile_is_in_a_first_step() -> None:
    """A worker's first steps: one row, prompts of these lengths, and its largest step."""
    for tile_of in (quantised_tile, product_tile):
        first = {tile_of(rows) for rows in (1, *WARM_UP_TOKENS, 2048)}
        assert {tile_of(rows) for rows in range(1, 2049)} == first


@pytest.mark.parametrize("form", QUANTISED)
def test_exact_rows_do_not_depend_on_each_other(form: str) -> None:
    weight, x = quantised_weight(70, 256, **QUANTISED[form]), randn(600, 256, dtype=torch.float16)
    linear = QuantisedLinear(weight, None, num_sms=64, exact=True)
    together = linear(x)
    for rows in (slice(0, 1), slice(7, 23), slice(30, 90)):
        assert torch.equal(linear(x[rows]), together[rows])


def test_rows_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 3.2], [0, 0, 0, 0, 0], [-254.0, 1, 3, 5, 7]])
    rounded, scales = round_rows(x)
    assert torch.equal(scales, torch.tensor([1.0, 0.0, 2.0]))
    assert torch.equal(rounded * scales[:, None], rounded_rows(x))


def test_weights_of_other_forms_stand_side_by_side() -> None:
    parts = [
        quantised_weight(20, 128, **QUANTISED["AWQ"]),
        quantised_weight(12, 128, **QUANTISED["int8"]),
        randn(9, 128, dtype=torch.float16),
    ]
    x, bias = randn(5, 128, dtype=torch.float16), randn(41, dtype=torch.float16, seed=1)
    found = CudaKernels(1).linear(parts, bias)(x)
    assert relative_error(found, REFERENCE.linear(parts, bias)(x)) < 2 * ALLOWED[torch.float16]
    alike = [quantised_weight(20, 128, **QUANTISED["AWQ"], seed=seed) for seed in (1, 2)]
    joined = CudaKernels(1).linear(alike, None)
    assert isinstance(joined, QuantisedLinear)
    assert relative_error(joined(x), REFERENCE.linear(alike, None)(x)) < ALLOWED[torch.float16]


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_weights_are_quantised_at_load_as_on_cpus(scheme: Scheme) -> None:
    """An exact float8 linear keeps its inputs; the head is int8, and stays as it is beside float8."""
    weight, x = randn(33, 96, dtype=torch.float16) / 8, randn(4, 96, dtype=torch.float16)
    kernels = CudaKernels(1, exact=True, scheme=scheme)
    expected = REFERENCE.linear(quantise(weight, scheme), None)(x)
    assert relative_error(kernels.linear(weight, None)(x), expected) < ALLOWED[torch.float16]
    head = weight if scheme == "fp8" else quantise(weight, "int8")
    expected = REFERENCE.linear(head, None)(x.float())
    assert relative_error(kernels.head(weight)(x), expected) < ALLOWED[torch.float16]


def test_weights_whose_columns_are_sorted_by_group_take_the_inputs_in_that_order() -> None:
    weight, x = quantised_weight(8, 128, **QUANTISED["GPTQ of 4 bits"]), randn(2, 128)
    assert weight.order is not None
    plain = replace(weight, order=None)
    found = QuantisedLinear(weight, None)(x)
    assert relative_error(found, QuantisedLinear(plain, None)(x[:, weight.order])) < 1e-6
