"""The C++ linears compute what the plain torch one does, on every instruction set this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.native_kernels import DTYPES, REFERENCE, assert_close, randn, several
from torch import Tensor

from splitserve.kernels import packed_weights
from splitserve.kernels.measured_choice import NEVER, KernelChoices
from splitserve.kernels.select import cpu_multiplies_bfloat16

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
_cpu = native_cpu._cpu


@several
@given(
    m=st.integers(1, 90),
    n=st.integers(1, 70),
    k=st.integers(1, 900),
    dtype=DTYPES,
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear(
    native: native_cpu.NativeCpuKernels, m: int, n: int, k: int, dtype: torch.dtype, bias: bool, seed: int
) -> None:
    x, weight = randn(m, k, dtype=dtype, seed=seed), randn(n, k, dtype=dtype, seed=seed + 1)
    offset = randn(n, dtype=dtype) if bias else None
    exact = REFERENCE.linear(weight.float(), None if offset is None else offset.float())(x.float())
    terms = x.float().abs() @ weight.float().abs().T
    assert_close(
        native.linear(weight, offset)(x),
        exact.to(dtype),
        scale=exact.abs() + 1e-3 * terms if dtype == torch.bfloat16 else terms,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 48, 77])
@pytest.mark.parametrize("heights", [(70,), (5, 40, 3), (64, 64)])
def test_several_threads_pack_parts_into_panels_as_one_matrix(
    native: native_cpu.NativeCpuKernels, dtype: torch.dtype, k: int, heights: tuple[int, ...]
) -> None:
    parts = [randn(height, k, dtype=dtype, seed=height) for height in heights]
    n, panel = sum(heights), native._panel
    whole = torch.nn.functional.pad(torch.cat(parts), (0, k % 2, 0, -n % panel))
    step = 1 if dtype == torch.float32 else 2  # numbers of k that lie interleaved
    expected = whole.view(-1, panel, (k + k % 2) // step, step).transpose(1, 2).flatten()
    stale = torch.full_like(expected, 7)
    packed = native_cpu.PackedWeights(num_threads=3)
    packed._arena.empty = lambda count, _: stale.view(torch.uint8)[:count]  # type: ignore[method-assign]
    found = native_cpu.PackedLinear(parts, None, packed)
    assert torch.equal(found._packed.view(dtype), expected)


needs_codes = pytest.mark.skipif("avx512_bf16" not in _cpu.instruction_sets(), reason="needs AVX512-BF16")


def uneven(n: int, k: int, kind: str) -> Tensor:
    weight = randn(n, k, dtype=torch.bfloat16)
    if kind == "outliers":
        weight[::5, 3] *= 1e9
        weight[1::7, k // 2] = torch.inf
    if kind == "tiny":
        weight[::9, ::40] *= 2.0**-30
        weight[:, 1::50] = torch.tensor(1e-40).bfloat16()
        weight[3, :] = 0.0
        weight[:, 7] = -0.0
    return weight


@needs_codes
@pytest.mark.parametrize("kind", ["even", "outliers", "tiny"])
@pytest.mark.parametrize(("n", "k"), [(70, 64), (33, 320), (128, 1024)])
@pytest.mark.parametrize("threads", [1, 2])
def test_coded_weights_multiply_with_the_same_bits(kind: str, n: int, k: int, threads: int) -> None:
    _cpu.use_instruction_set("avx512_bf16")
    _cpu.set_num_threads(threads)
    weight, bias = uneven(n, k, kind), randn(n, dtype=torch.bfloat16)
    plain, coded = (
        native_cpu.PackedLinear(
            [weight[:5], weight[5:]], bias, native_cpu.PackedWeights(num_threads=threads), coded=as_codes
        )
        for as_codes in (False, True)
    )
    assert coded.coded
    assert coded._packed.nbytes < 0.77 * plain._packed.nbytes
    for m in (*range(1, 14), 24, 25, 37, 400):
        x = randn(m, k, dtype=torch.bfloat16, seed=m)
        assert torch.equal(plain(x).view(torch.int16), coded(x).view(torch.int16))
    _cpu.set_num_threads(1)


@needs_codes
def test_weights_of_too_many_exponents_stay_plain() -> None:
    _cpu.use_instruction_set("avx512_bf16")
    weight = randn(40, 128, dtype=torch.bfloat16)
    weight[0, :16] *= 2.0**-60
    for matrix in (weight, randn(40, 100, dtype=torch.bfloat16), randn(40, 128, dtype=torch.float32)):
        packed = native_cpu.PackedWeights()
        linear = native_cpu.PackedLinear(matrix, None, packed, coded=True)
        assert not linear.coded
        assert [memory.nbytes for memory in packed._given] == [linear._packed.nbytes]
        x = randn(3, matrix.shape[1], dtype=matrix.dtype)
        assert torch.equal(linear(x), native_cpu.PackedLinear(matrix, None, native_cpu.PackedWeights())(x))


@needs_codes
def test_the_next_start_finds_weights_in_the_form_they_were_kept_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 0)
    _cpu.use_instruction_set("avx512_bf16")
    weights = [uneven(n, 128, "outliers") for n in (64, 40, 64)]
    weights[1][0, :16] = torch.arange(16).bfloat16().exp2() * 2.0**-90

    def start() -> list[native_cpu.PackedLinear]:
        packed = native_cpu.PackedWeights([tmp_path / "weights.packed"])
        linears = [native_cpu.PackedLinear(weight, None, packed, coded=True) for weight in weights]
        thread = packed.finish()
        assert thread is not None
        thread.join(10)
        return linears

    first = start()
    monkeypatch.setattr(_cpu, "pack_linear", lambda *_: pytest.fail("packed again"))
    second = start()
    assert [linear.coded for linear in second] == [linear.coded for linear in first] == [True, False, True]
    for before, after in zip(first, second, strict=True):
        assert torch.equal(before._packed, after._packed)


@pytest.mark.skipif(not cpu_multiplies_bfloat16(), reason="this CPU has neither AVX512-BF16 nor AMX")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 8, NEVER])
def test_a_linear_is_onednns_from_as_many_rows_as_were_measured(bias: bool, rows: int) -> None:
    choices = KernelChoices(None, "")
    choices.made["100x64"] = rows
    kernels = native_cpu.NativeCpuKernels(1, _cpu.instruction_sets()[0], choices)
    weight = randn(100, 64, dtype=torch.bfloat16)
    linear = kernels.linear(weight, offset := randn(100, dtype=torch.bfloat16) if bias else None)
    kinds = {0: native_cpu.OneDnnLinear, 8: native_cpu.LinearByRows, NEVER: native_cpu.PackedLinear}
    assert type(linear) is kinds[rows]
    for m in (1, 7, 8, 130):
        x = randn(m, 64, dtype=torch.bfloat16, seed=m)
        exact = REFERENCE.linear(weight.float(), None if offset is None else offset.float())(x.float())
        assert_close(linear(x), exact.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [500, 3001])  # the odd one takes a block of few rows
def test_a_row_of_a_linear_does_not_depend_on_the_rows_beside_it(
    native: native_cpu.NativeCpuKernels, dtype: torch.dtype, k: int
) -> None:
    x, linear = randn(300, k, dtype=dtype), native.linear(randn(41, k, dtype=dtype), None)
    together = linear(x)
    for count in (1, 2, 5, 12, 13, 24, 25, 64, 257):
        assert torch.equal(linear(x[:count].clone()), together[:count])


def test_threads_share_a_call_without_changing_it(native: native_cpu.NativeCpuKernels) -> None:
    x, weight = randn(70, 300, dtype=torch.float32), randn(500, 300, dtype=torch.float32)
    alone = native.linear(weight, None)(x)
    _cpu.set_num_threads(3)
    try:
        assert torch.equal(native.linear(weight, None)(x), alone)
    finally:
        _cpu.set_num_threads(1)
