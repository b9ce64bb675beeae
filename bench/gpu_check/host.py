"""The host's CPU, and the C++ kernels on it by each instruction set: AMX's tiles had been played before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from ...kernels.select import cpu_multiplies_bfloat16, kernels_in_words
from ..environment import environment
from ..kernels import engine
from ..kernels.kernel_inputs import relative_error
from .line import Line, Place, checked, left_out

UNITS = ("avx512_bf16", "avx512_vnni", "amx_tile", "amx_int8", "amx_bf16")
SIZES = (1000, 1100)  # outputs and inputs, which fill no last panel and no last step
ROWS = (1, 2, 15, 16, 17, 33, 150)
ALLOWED = 5e-3  # y is bfloat16
TILES, BESIDE = "avx512_amx", "avx512_bf16"


def cpu(place: Place) -> Iterator[Line]:
    """Which units it has; products of each instruction set by value and by time; decode and prefill."""
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    units = ", ".join(unit for unit in UNITS if unit in flags) or "none of the units for bfloat16"
    yield Line("the host's CPU", headline=True, note=f"{environment()['cpu']}: {units}")
    try:
        from ...kernels import _cpu, native_cpu  # noqa: F401, which refuses a build from other sources
    except ImportError as missing:
        yield left_out("the C++ kernels", str(missing))
        return
    names = [name for name in _cpu.instruction_sets() if name.startswith("avx512")]
    for name in names:
        yield from _values(name)
    yield from _times(place, [*names, *(["onednn"] if cpu_multiplies_bfloat16() else [])])
    yield from _steps(place)


def _values(name: str) -> Iterator[Line]:
    from ...kernels.native_cpu import NativeCpuKernels

    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in (SIZES, SIZES[:1], (max(ROWS), SIZES[1]))
    )
    linear = NativeCpuKernels(1, name).linear(weight, bias)
    whole = linear(x)
    expected = x.double() @ weight.double().T + bias.double()
    yield checked(f"{name}: a product", relative_error(whole, expected), ALLOWED)
    same = all(torch.equal(linear(x[-rows:]), whole[-rows:]) for rows in ROWS)
    yield Line(f"{name}: bits of a row in any number of rows", good=same)


def _times(place: Place, names: list[str]) -> Iterator[Line]:
    """All linear layers of a model beside oneDNN's."""
    from ..kernels import cpu_products

    torch.set_num_threads(1)
    with torch.inference_mode():
        block, peak = engine.read_block(), engine.multiply_rate(torch.bfloat16)
        config = cpu_products.config_of("125m" if place.big else "tiny")
        for case in cpu_products.products("0.1B", config, names):
            rows = list(cpu_products.measure(case, block, peak))
            ms = {row["kernel"]: float(row["ms"]) for row in rows}
            for row in rows:
                beside = (
                    f"{ms[BESIDE] / float(row['ms']):.2f} times as fast as {BESIDE}" if BESIDE in ms else ""
                )
                yield Line(
                    f"{case.what}, {row['kernel']}, one thread: of the floor",
                    value=float(row["share_of_floor"]),
                    unit="share",
                    headline=row["kernel"] == TILES,
                    note=f"{row['ms']:.1f} ms; {beside}",
                )


def _steps(place: Place) -> Iterator[Line]:
    """Steps of the engine, with the kernels that a worker would choose."""
    record = place.work / "cpu engine.json"
    command = [sys.executable, "-m", engine.__name__, "--models", "125m"]
    command += ["--dtypes", "bfloat16", "--longest", "512" if place.big else "64", "--json", str(record)]
    subprocess.run(command, check=True)
    for row in json.loads(record.read_text())["rows"]:
        yield Line(f"CPU, {row['model']}: {row['what']}", value=row["ms"], unit="ms")
    yield Line("a worker's kernels on this CPU", headline=True, note=kernels_in_words())
