"""Compiles kernels for a Hopper GPU (sm_90) on any machine and reads what became of them: registers, spills,
shared memory, instructions.

    with sm90.compiling() as kernels:
        gate_mul(torch.empty(...), "silu")  # the product's own call: compiled as it would be, never run
    kernels[0].registers

Only in a process that imports Triton without TRITON_INTERPRET; nothing can run on a GPU in it afterwards.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = 227 * 1024  # bytes a program may use; each takes 1 KiB more of its SM's 228
REGISTERS = 65536  # of an SM
THREADS = 2048
NUM_SMS = 132
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Compiled:
    """``stack``: bytes a thread, where registers did not suffice. ``wgmma``, ``mma``: matrix instructions of
    a warp group, of a warp; ``products``: their shapes. ``contracts``: the compiler may join a product and a
    sum, so that it chooses which products are rounded. (Instructions as the assembler was given them: to take
    its output apart again would cost more time than all the rest of it.)"""

    name: str
    registers: int
    stack: int
    shared: int  # bytes
    threads: int
    wgmma: int
    mma: int
    products: tuple[str, ...]
    contracts: bool
    async_copies: int  # from device to shared memory

    @property
    def programs_per_sm(self) -> int:
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * self.threads)
        return min(by_registers, (SHARED_MEMORY + 1024) // (self.shared + 1024), THREADS // self.threads, 32)

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"programs_per_sm": self.programs_per_sm}


inspected: dict[str, Compiled] = {}
cubins: dict[str, bytes] = {}  # by the kernel's name, the one compiled last


@contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Within it, launches compile and add to the list."""
    found: list[Compiled] = []
    jit: Any = JITFunction
    run = jit.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = run(self, *args, grid=(1,), warmup=True, **options)
        if kernel.hash not in inspected:
            inspected[kernel.hash] = _inspect(self.fn.__name__, kernel)
        found.append(inspected[kernel.hash])
        return kernel

    driver.set_active(_NoDriver())
    jit.run = compile_only
    try:
        yield found
    finally:
        jit.run = run


class _NoDriver:
    """What Triton asks of a driver before it launches."""

    class utils:
        @staticmethod
        def get_device_properties(_: int) -> dict[str, int]:
            return {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": NUM_SMS, "warpSize": 32}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu


def _inspect(name: str, kernel: Any) -> Compiled:
    cubins[name] = kernel.asm["cubin"]
    usage = dict(re.findall(r"(REG|STACK):(\d+)", _read(cubins[name], "cuobjdump", "-res-usage")))
    ptx = kernel.asm["ptx"]
    threads = re.search(r"\.reqntid (\d+)", ptx)
    assert threads is not None
    return Compiled(
        name=name,
        registers=int(usage["REG"]),
        stack=int(usage["STACK"]),
        shared=kernel.metadata.shared,
        threads=int(threads[1]),
        wgmma=len(re.findall(r"\bwgmma\.mma_async\b", ptx)),
        mma=len(re.findall(r"\bmma\.sync\b", ptx)),
        products=tuple(sorted(set(re.findall(r"\bmma(?:_async)?\.sync\.aligned\.(m\d+n\d+k\d+)", ptx)))),
        contracts=kernel.metadata.enable_fp_fusion,
        async_copies=len(re.findall(r"\bcp\.async\.c[ag]\b", ptx)),
    )


def innermost_loops(cubin: bytes) -> list[list[str]]:
    """The instructions of each loop that has no other in it, in the order of the code."""
    code: list[str] = []
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    last = 0  # where the last loop began
    for line in _read(cubin, "nvdisasm", "-c").splitlines():
        if label := re.match(r"(\.L_x_\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(found[1])
            target = re.search(r"\bBRA\b.*(\.L_x_\w+)", found[1])
            start = labels.get(target[1], -1) if target else -1
            if start >= last and len(code) - start > 1:
                loops.append(code[start:])
                last = len(code)
    return loops


def _read(cubin: bytes, tool: str, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / tool), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
