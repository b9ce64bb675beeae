"""A step without memory is reported as such, its tensors are gone, and the thread goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from support.failing_runner import EMPTY, Failing, OneStep

from splitserve.engine.step.step_thread import Finished, StepThread


def of_python() -> None:
    raise MemoryError


def of_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def of_torch_on_a_cpu() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def of_cublas() -> None:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def of_the_driver() -> None:
    raise RuntimeError("Triton Error [CUDA]: out of memory")


def of_something_else() -> None:
    raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize(
    ("fail", "out_of_memory"),
    [
        (of_python, True),
        (of_a_gpu, True),
        (of_torch_on_a_cpu, True),
        (of_cublas, True),
        (of_the_driver, True),
        (of_something_else, False),
    ],
)
def test_what_counts_as_out_of_memory(fail: Callable[[], object], out_of_memory: bool) -> None:
    runner, woken = Failing(), threading.Event()
    steps: StepThread[OneStep] = StepThread(runner, woken.set)

    def run() -> Finished[OneStep]:
        woken.clear()
        steps.submit(OneStep(EMPTY))
        assert woken.wait(60)
        finished = steps.collect()
        assert finished is not None
        return finished

    try:
        runner.fail = fail
        failed = run()
        assert failed.error is not None
        assert failed.out_of_memory == out_of_memory
        if out_of_memory:
            assert runner.held is not None
            assert runner.held() is None  # although the error is still at hand
        runner.fail = None
        assert run().output is not None
    finally:
        steps.stop()
