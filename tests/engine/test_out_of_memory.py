"""A step without memory is reported as such, its tensors are gone, and the thread goes on."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from splitserve.engine.batch import Batch, StepOutput
from splitserve.engine.step_thread import Finished, StepThread

EMPTY = Batch(
    token_ids=np.zeros(1, np.int32),
    positions=np.zeros(1, np.int32),
    query_start_loc=np.array([0, 1], np.int32),
    seq_lens=np.ones(1, np.int32),
    block_tables=np.zeros((1, 1), np.int32),
    slot_mapping=np.zeros(1, np.int64),
    sampling=[None],
)


@dataclass
class OneStep:
    batch: Batch


class Failing:
    """Raises what it is given, if anything, while it holds a tensor."""

    def __init__(self) -> None:
        self.fail: Callable[[], object] | None = None
        self.held: weakref.ref[torch.Tensor] | None = None

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        activations = torch.zeros(1000)
        self.held = weakref.ref(activations)
        if self.fail is not None:
            self.fail()
        return StepOutput(batch.token_ids)


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
        assert woken.wait(10)
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
