from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from splitserve.kernels.measured_choice import KernelChoices

try:
    from splitserve.kernels import native_cpu, native_linear
except ImportError:
    INSTRUCTION_SETS = []
else:
    INSTRUCTION_SETS = native_cpu._cpu.instruction_sets()
GUARD = 4096  # bytes before and after each tensor
UNTOUCHED = 0xA5


@pytest.fixture
def guarded_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What kernels allocate begins as NaN (integers: -1) and lies between guards, which must be whole at the
    end of the test."""
    buffers: list[Tensor] = []
    allocate = torch.empty

    def guarded(*size: Any, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        num_bytes = shape.numel() * dtype.itemsize
        buffers.append(allocate(num_bytes + 2 * GUARD, dtype=torch.uint8, device=device).fill_(UNTOUCHED))
        return buffers[-1][GUARD : GUARD + num_bytes].fill_(0xFF).view(dtype).view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    monkeypatch.setattr(torch, "empty_like", lambda x: guarded(*x.shape, dtype=x.dtype, device=x.device))
    yield
    for buffer in buffers:
        assert (buffer[:GUARD] == UNTOUCHED).all(), "written before the beginning of a tensor"
        assert (buffer[-GUARD:] == UNTOUCHED).all(), "written beyond the end of a tensor"


@pytest.fixture(params=INSTRUCTION_SETS)
def native(request: pytest.FixtureRequest) -> Iterator[native_cpu.NativeCpuKernels]:
    """The C++ kernels with each instruction set of this machine."""
    yield native_cpu.NativeCpuKernels(1, request.param)
    chosen = native_linear.measured_instruction_set(KernelChoices.of_this_machine())
    native_cpu._cpu.use_instruction_set(chosen)
