"""The exact and the float8 linear layers of the GPU, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.gate_up import DISTINCT_TILES, GateUpTile, gate_up
from splitserve.bench.kernels.kernel_inputs import randn, relative_error
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu import fp8_linear
from splitserve.kernels.gpu.elementwise import gate_fp8, gate_mul
from splitserve.kernels.gpu.exact_linear import BLOCK_K, ExactLinear
from splitserve.kernels.gpu.fp8_linear import Fp8Linear
from splitserve.kernels.gpu.fp8_rows import fp8_rows
from splitserve.kernels.gpu.norm import add_rms_norm, norm_fp8, rms_norm
from splitserve.kernels.mixture_shape import ACTIVATIONS
from splitserve.kernels.reference import TorchLinear

triton_interpreter.install()
pytestmark = [
    pytest.mark.usefixtures("guarded_memory"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]

few = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ALLOWED = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@few
@given(
    m=st.sampled_from([1, 3, 64, 65, 130]),
    n=st.sampled_from([1, 40, 130]),
    k=st.sampled_from([16, 64, 100, 192]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
)
def test_an_exact_linear_is_a_product(m: int, n: int, k: int, dtype: torch.dtype, bias: bool) -> None:
    x, weight, offset = (
        randn(m, k, dtype=dtype),
        randn(n, k, dtype=dtype, seed=1),
        randn(n, dtype=dtype, seed=2),
    )
    expected = x.double() @ weight.double().t() + (offset.double() if bias else 0)
    assert relative_error(ExactLinear(weight, offset if bias else None)(x), expected) < ALLOWED[dtype]


def test_its_rows_do_not_depend_on_each_other() -> None:
    x, linear = (
        randn(600, 128, dtype=torch.bfloat16),
        ExactLinear(randn(70, 128, dtype=torch.bfloat16, seed=1), None),
    )
    together = linear(x)
    for rows in (slice(0, 1), slice(7, 70), slice(100, 300)):
        assert torch.equal(linear(x[rows]), together[rows])


@few
@given(
    m=st.sampled_from([1, 3, 64, 130]),
    n=st.sampled_from([16, 40, 130]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    tile=st.sampled_from(DISTINCT_TILES),
)
def test_gate_and_up_by_one_kernel_round_as_by_two(
    m: int, n: int, dtype: torch.dtype, tile: GateUpTile
) -> None:
    k = 2 * tile.inputs
    x, weight = randn(m, k + 16, dtype=dtype)[:, :k], randn(2 * n, k, dtype=dtype, seed=1)
    found, expected = gate_up(x, weight, tile), gate_mul(ExactLinear(weight, None)(x), "silu")
    if tile.inputs == BLOCK_K:
        assert torch.equal(found, expected)
    assert relative_error(found, expected) < ALLOWED[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_quantized_each_with_its_own_scale(dtype: torch.dtype) -> None:
    x = randn(5, 300, dtype=dtype) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 1.0], dtype=dtype)[:, None]
    quantized, scales = fp8_rows(x)
    expected_scales = (x.float().abs().amax(1, keepdim=True) / 448).clamp(min=1e-12)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized.float(), (x.float() / expected_scales).to(torch.float8_e4m3fn).float())


def test_a_float8_linear_with_a_scale_a_channel_is_close() -> None:
    x, weight = randn(20, 64, dtype=torch.bfloat16), randn(48, 64, dtype=torch.bfloat16, seed=1)
    weight *= torch.logspace(-3, 2, 48)[:, None].bfloat16()
    linear = Fp8Linear(weight, None)
    expected = x.double() @ weight.double().t()
    columns = (linear(x) - expected).norm(dim=0) / expected.norm(dim=0)
    assert columns.max() < 0.1


@few
@given(
    rows=st.integers(1, 3),
    n=st.sampled_from([1, 100, 1024, 1500]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_norms_and_gates_write_float8_rows_themselves(rows: int, n: int, dtype: torch.dtype) -> None:
    x, residual, weight = (randn(rows, n, dtype=dtype, seed=seed) for seed in range(3))
    ours = residual.clone()
    cases = [
        (norm_fp8(x, ours, weight[0], 1e-5), add_rms_norm(x, residual, weight[0], 1e-5)),
        (norm_fp8(None, ours, weight[0], 1e-5), rms_norm(residual, weight[0], 1e-5)),
    ]
    assert torch.equal(ours, residual)
    gate_up = randn(rows, 2 * n, dtype=dtype) * 9
    cases += [(gate_fp8(gate_up, act), gate_mul(gate_up, act)) for act in ACTIVATIONS]
    for (found, scales), wide in cases:
        expected, expected_scales = fp8_rows(wide)
        assert torch.equal(found.float(), expected.float())
        assert torch.equal(scales, expected_scales)


def test_weights_are_quantised_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of an 8B model as float32, three times over and on eight threads, took 11 GiB of the card."""
    parts = [randn(48, 64, dtype=torch.bfloat16, seed=seed) for seed in (1, 2)]
    whole = Fp8Linear(torch.cat(parts), None)
    monkeypatch.setattr(fp8_linear, "SLICE_BYTES", 4 * 64 * 10)  # ten rows
    largest, widen = 0, torch.Tensor.float

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel() * 4)
        return widen(tensor)

    monkeypatch.setattr(torch.Tensor, "float", noted)
    sliced = Fp8Linear(parts, None)
    monkeypatch.undo()
    assert 0 < largest <= 4 * 64 * 10
    assert torch.equal(sliced._weight.float(), whole._weight.float())
    assert torch.equal(sliced._scales, whole._scales)


def test_the_head_is_never_quantised() -> None:
    weight = randn(48, 64, dtype=torch.bfloat16)
    kernels = CudaKernels(num_sms=1, scheme="fp8")
    assert isinstance(kernels.linear([weight, weight], None), Fp8Linear)
    assert isinstance(kernels.head(weight), TorchLinear)
    assert isinstance(CudaKernels(num_sms=1, exact=True).head(weight), ExactLinear)


def test_a_float8_product_sums_in_the_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way, torch's default, adds each 128 products up in float32 on ordinary cores."""
    asked, product = [], torch._scaled_mm

    def noted(*args: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.append(options["use_fast_accum"])
        return product(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    x, weight = randn(20, 64, dtype=torch.bfloat16), randn(48, 64, dtype=torch.bfloat16, seed=1)
    Fp8Linear(weight, None)(x)
    assert asked == [True]
