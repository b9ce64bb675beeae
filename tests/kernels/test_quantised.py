"""The C++ kernels of quantised weights agree with the dequantised product on every instruction set of this
machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.quantised_weights import assert_product, multiples_of_supers, randn, random_float4, random_weight

from splitserve.kernels.quantised import SUPER_BLOCK, QuantisedWeight, Scheme, quantise, rounded_rows
from splitserve.kernels.reference import TorchKernels

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
_cpu = native_cpu._cpu
SCHEMES: tuple[Scheme, ...] = ("int8", "int4", "fp8")
several = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@several
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    scheme=st.sampled_from(SCHEMES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_what_is_quantised_at_load(
    native: native_cpu.NativeCpuKernels, m: int, n: int, k: int, scheme: Scheme, dtype: torch.dtype, seed: int
) -> None:
    native._quantization = scheme
    weight, bias = randn(n, k, seed=seed).to(dtype), randn(n, seed=seed + 1).to(dtype)
    x = randn(m, k, seed=seed + 2).to(dtype)
    assert_product(native.linear(weight, bias)(x), x, quantise(weight, scheme).dequantised(), bias)


@several
@given(
    m=st.integers(1, 40),
    rows=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    groups=st.integers(1, 5),
    group=st.sampled_from([16, 32, 64, 128, 256]),
    bits=st.sampled_from([4, 8]),
    zeros=st.booleans(),
    order=st.booleans(),
    halves=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_what_a_checkpoint_has_quantised(
    native: native_cpu.NativeCpuKernels,
    m: int,
    rows: list[int],
    groups: int,
    group: int,
    bits: int,
    zeros: bool,
    order: bool,
    halves: bool,
    dtype: torch.dtype,
) -> None:
    k = groups * group
    parts = [random_weight(n, k, bits, group, zeros, order, halves, seed=n) for n in rows]
    x = randn(m, k, seed=m).to(dtype)
    weight = torch.cat([part.dequantised() for part in parts])
    assert_product(native.linear(parts, None)(x), x, weight)
    assert torch.equal(TorchKernels().linear(parts, None)(x), F.linear(x.float(), weight).to(dtype))


@several
@given(
    m=st.integers(1, 40),
    rows=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    supers=st.integers(1, 3),
    group=st.sampled_from([16, 32]),
    bits=st.sampled_from([4, 8]),
    minimums=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_scales_that_are_multiples_of_their_super_blocks(
    native: native_cpu.NativeCpuKernels,
    m: int,
    rows: list[int],
    supers: int,
    group: int,
    bits: int,
    minimums: bool,
    dtype: torch.dtype,
) -> None:
    k = supers * SUPER_BLOCK
    parts = [multiples_of_supers(n, k, bits, group, minimums, seed=n) for n in rows]
    x = randn(m, k, seed=m).to(dtype)
    linear = native.linear(parts, None)
    scale_bytes = rows_padded(rows, native) * (k // group + 2 * supers) * (1 + minimums)
    assert kept_bytes(linear) == rows_padded(rows, native) * k * bits // 8 + scale_bytes
    assert_product(linear(x), x, torch.cat([part.dequantised() for part in parts]))


def rows_padded(rows: list[int], native: native_cpu.NativeCpuKernels) -> int:
    return -(-sum(rows) // native._panel) * native._panel


def kept_bytes(linear: native_cpu.Linear) -> int:
    assert isinstance(linear, native_cpu.QuantisedLinear)
    return sum(tensor.nbytes for tensor in linear._kept)


def test_minimums_beside_zeros(native: native_cpu.NativeCpuKernels) -> None:
    weight = replace(random_weight(40, 256, 8, 32, True, False, False, 1), minimums=randn(40, 8, seed=2))
    x = randn(3, 256, seed=3)
    rows = torch.tensor([5, 0, 39])
    assert torch.equal(weight.rows(rows).dequantised(), weight.dequantised()[rows])
    assert_product(native.linear(weight, None)(x), x, weight.dequantised())


@several
@given(
    m=st.integers(1, 40),
    rows=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    groups=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_float4(
    native: native_cpu.NativeCpuKernels, m: int, rows: list[int], groups: int, dtype: torch.dtype
) -> None:
    parts = [random_float4(n, 32 * groups, seed=n) for n in rows]
    x, weight = randn(m, 32 * groups, seed=m).to(dtype), torch.cat([part.dequantised() for part in parts])
    assert_product(native.linear(parts, None)(x), x, weight)
    assert torch.equal(TorchKernels().linear(parts, None)(x), F.linear(x.float(), weight).to(dtype))


def test_each_number_of_float4_is_multiplied_exactly(native: native_cpu.NativeCpuKernels) -> None:
    codes = torch.arange(16, dtype=torch.uint8)[:, None].expand(16, 16) * 17
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = torch.tensor([*numbers, *(-number for number in numbers)])
    weight = QuantisedWeight(codes.contiguous(), torch.full((16, 1), 0.25), 32, 32, 4, float4=True)
    x = torch.zeros(20, 32)
    x[:, 5] = 127.0 * 2.0 ** torch.arange(20)
    for m in (1, 20):
        assert torch.equal(native.linear(weight, None)(x[:m]), x[:m, 5:6] * expected / 4)


@pytest.mark.parametrize("zeros", [True, False])
def test_forms_that_differ_become_one_linear(native: native_cpu.NativeCpuKernels, zeros: bool) -> None:
    parts = [
        random_weight(40, 256, 4, 32, zeros, False, True, seed=0),
        random_weight(33, 256, 8, 16, False, True, False, seed=1),
        quantise(randn(20, 256, seed=2), "fp8"),
        random_float4(21, 256, seed=6),
    ]
    x, bias = randn(9, 256, seed=3), randn(114, seed=4)
    linear = native.linear(parts, bias)
    assert isinstance(linear, native_cpu.QuantisedLinear)
    assert_product(linear(x), x, torch.cat([part.dequantised() for part in parts]), bias)
    plain = randn(10, 256, seed=5)
    mixed = torch.cat([parts[0].dequantised(), plain])
    assert_product(native.linear([parts[0], plain], bias[:50])(x), x, mixed, bias[:50])


def test_inputs_rounded_to_int8(native: native_cpu.NativeCpuKernels) -> None:
    weight = replace(quantise(randn(50, 300, seed=0), "int8"), rounds_x=True)
    x = randn(7, 300, seed=1)
    assert_product(native.linear(weight, None)(x), rounded_rows(x), weight.dequantised())
    assert_product(TorchKernels().linear(weight, None)(x), rounded_rows(x), weight.dequantised())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    native: native_cpu.NativeCpuKernels, scheme: Scheme, dtype: torch.dtype
) -> None:
    native._quantization = scheme
    x = randn(300, 704, seed=0).to(dtype)
    for weight in (randn(41, 704, seed=1).to(dtype), random_float4(41, 704, seed=1)):
        linear = native.linear(weight, None)
        together = linear(x)
        for count in (1, 2, 3, 4, 5, 9, 12, 13, 64, 257):
            assert torch.equal(linear(x[:count].clone()), together[:count])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_whole_numbers_have_the_same_bits_on_all_instruction_sets_of_one_width(scheme: Scheme) -> None:
    x = randn(30, 256, seed=0)
    for weight in (randn(64, 256, seed=1), random_float4(64, 256, seed=1)):
        found = [
            native_cpu.NativeCpuKernels(1, name, quantization=scheme).linear(weight, None)(x)
            for name in _cpu.instruction_sets()
            if name.startswith("avx512")
        ]
        assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize(("scheme", "most"), [("int8", 0.008), ("int4", 0.09), ("fp8", 0.03)])
def test_the_error_of_a_scheme(scheme: Scheme, most: float) -> None:
    weight = randn(130, 257, seed=0)
    error = quantise(weight, scheme).dequantised() - weight
    assert error.pow(2).mean().sqrt() < most
    assert torch.equal(quantise(torch.zeros(3, 40), scheme).dequantised(), torch.zeros(3, 40))


def test_the_head_is_int8_but_with_float8_not_quantised() -> None:
    isa, weight, x = _cpu.instruction_sets()[0], randn(100, 64, seed=0), randn(2, 64, seed=1)
    for scheme in SCHEMES:
        head = native_cpu.NativeCpuKernels(1, isa, quantization=scheme).head(weight)
        expected = weight if scheme == "fp8" else quantise(weight, "int8").dequantised()
        assert_product(head(x), x, expected)
