"""A step after which the GPU is of no use to its process is distinguished from one that failed by a request,
or by too little memory."""

from __future__ import annotations

import threading

import pytest
import torch
from support.failing_runner import EMPTY, Failing, OneStep

from splitserve.engine.errors import DeviceLostError
from splitserve.engine.step.step_thread import Finished, StepThread

ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect."
)


def run_one(error: Exception) -> Finished[OneStep]:
    def fail() -> None:
        raise error

    runner, woken = Failing(), threading.Event()
    runner.fail = fail
    steps: StepThread[OneStep] = StepThread(runner, woken.set)
    try:
        steps.submit(OneStep(EMPTY))
        assert woken.wait(60)
        finished = steps.collect()
        assert finished is not None
        return finished
    finally:
        steps.stop()


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered" + ADVICE), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered" + ADVICE), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (torch.AcceleratorError("CUDA error: invalid argument" + ADVICE), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("a prompt that says: misaligned address"), False),
    ],
    ids=lambda value: str(value).splitlines()[0],
)
def test_what_counts_as_a_lost_device(error: Exception, lost: bool) -> None:
    finished = run_one(error)
    assert isinstance(finished.error, DeviceLostError) == lost
    if lost:
        assert finished.error is not None
        assert finished.error.__cause__ is error
        assert "\n" not in str(finished.error), "one sentence; the cause says the rest"
    else:
        assert finished.error is error


def test_a_lost_device_is_found_where_memory_was_to_be_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty_cache() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    finished = run_one(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert isinstance(finished.error, DeviceLostError)
    assert not finished.out_of_memory
