"""Products by AMX's tiles, on every CPU with AVX512-BF16: where it has no tiles, they are played."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
_cpu = native_cpu._cpu

needs_units = pytest.mark.skipif(
    "avx512_bf16" not in _cpu.instruction_sets() or not shutil.which("c++"), reason="needs AVX512-BF16"
)


class LinearArgs(ctypes.Structure):
    """The struct of this name in kernels/cpu/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "packed", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k")),
        ("dtype", ctypes.c_int),
        ("num_parts", ctypes.c_int64),
    )


@pytest.fixture(scope="module")
def linear_amx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    built, source = (
        tmp_path_factory.mktemp("tiles") / "played.so",
        Path(__file__).with_name("played_tiles.cpp"),
    )
    command = ["c++", "-std=c++17", "-O2", "-shared", "-fPIC", str(source), "-o", str(built)]
    subprocess.run(command, check=True, timeout=60)
    played = ctypes.CDLL(str(built))
    played.start_playing()
    yield ctypes.CDLL(_cpu.__file__)["_ZN10splitserve10linear_amxERKNS_10LinearArgsEll"]
    played.stop_playing()


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def multiply(
    linear_amx: Callable[..., None], x: Tensor, packed: Tensor, bias: Tensor | None, n: int, *, cut: int = 0
) -> Tensor:
    """By tiles: the panels before ``cut``, and then the others."""
    y = torch.empty(x.shape[0], n, dtype=x.dtype)
    args = LinearArgs(
        x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        x.shape[0], n, x.shape[1], int(x.dtype == torch.bfloat16), 0,
    )  # fmt: skip
    for first, last in ((0, cut), (cut, (n + 31) // 32)):
        if first < last:
            linear_amx(ctypes.byref(args), ctypes.c_int64(first), ctypes.c_int64(last))
    return y


@needs_units
@pytest.mark.usefixtures("guarded_memory")
@pytest.mark.parametrize("k", [1, 2, 31, 32, 70, 512, 545, 1100])
@pytest.mark.parametrize("n", [1, 33, 96])
def test_tiles_multiply(linear_amx: Callable[..., None], n: int, k: int) -> None:
    native_cpu.NativeCpuKernels(1, "avx512_bf16")
    weight, bias = randn(n, k), randn(n)
    packed = native_cpu.PackedLinear(weight, bias, native_cpu.PackedWeights())._packed
    x = randn(150, k, seed=1)
    every = multiply(linear_amx, x, packed, bias, n)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(every.double(), expected, rtol=2**-8, atol=2**-8)
    for rows in (
        slice(1),
        slice(3, 5),
        slice(20, 36),
        slice(7, 24),
        slice(0, 32),
        slice(50, 83),
        slice(100, 150),
    ):
        assert torch.equal(multiply(linear_amx, x[rows], packed, bias, n, cut=1), every[rows])
    without = multiply(linear_amx, x, packed, None, n).double()
    torch.testing.assert_close(without, expected - bias.double(), rtol=2**-8, atol=2**-8)


@needs_units
def test_more_rows_than_a_block_of_x_holds(linear_amx: Callable[..., None]) -> None:
    native_cpu.NativeCpuKernels(1, "avx512_bf16")
    weight, x = randn(40, 4096), randn(203, 4096, seed=1)
    packed = native_cpu.PackedLinear(weight, None, native_cpu.PackedWeights())._packed
    found = multiply(linear_amx, x, packed, None, 40)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=2**-8, atol=2**-5)
    assert torch.equal(multiply(linear_amx, x[190:], packed, None, 40), found[190:])


@needs_units
def test_float32_is_multiplied_as_ever(linear_amx: Callable[..., None]) -> None:
    native_cpu.NativeCpuKernels(1, "avx512_bf16")
    weight, x = (randn(rows, 70, dtype=torch.float32) for rows in (40, 5))
    linear = native_cpu.PackedLinear(weight, None, native_cpu.PackedWeights())
    assert torch.equal(multiply(linear_amx, x, linear._packed, None, 40), linear(x))
