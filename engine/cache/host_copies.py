"""What a step has computed on a GPU, brought to the host without holding up the steps behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Arrival = Callable[[], Sequence[Tensor]]


def bring(tensors: Sequence[Tensor]) -> Arrival:
    """Begins to copy; the call that it returns waits until all is there, but not for what is launched later.
    On a CPU it is there."""
    if not tensors or not tensors[0].is_cuda:
        return lambda: tensors
    host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream())

    def arrived() -> Sequence[Tensor]:
        done.synchronize()
        return host

    return arrived


def passed(device: torch.device) -> Callable[[], None]:
    """A call that waits until the device has done what it has been given so far, but nothing that is launched
    later."""
    if device.type != "cuda":
        return lambda: None
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream())
    return done.synchronize


def send(values: Tensor, device: torch.device) -> Tensor:
    """These host values on the device, copied without waiting for it; on a CPU they are there."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
