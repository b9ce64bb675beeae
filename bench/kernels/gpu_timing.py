"""Times on a GPU, as a CUDA graph replays them, and what the GPU could do at best, measured in the same
run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Figure:
    """``floor_us``: what the bytes take at the rate of a copy, or the FLOPs at the rate of a large product,
    whichever is longer. ``rate``: in ``unit`` per second, of the useful bytes or FLOPs. ``goal``: for
    ``ratio``, at least."""

    what: str
    us: float
    floor_us: float
    rate: float
    unit: str
    goal: float | None = None

    @property
    def ratio(self) -> float:
        return self.floor_us / self.us


@dataclass(frozen=True, slots=True)
class Ceilings:
    """bytes/s of a copy (read and written) or of reading alone, whichever is more; bfloat16 FLOP/s of a large
    product; microseconds of the smallest kernel within a graph."""

    copy: float
    flops: float
    launch_us: float


def microseconds(calls: Sequence[Call], replays: int = 10) -> float:
    """Microseconds of one call, the median over graph replays of all. Give several, on buffers that together
    outgrow the cache. Without a GPU: of one call of the first."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        calls[0]()
        return (time.perf_counter() - started) * 1e6
    cuda: Any = torch.cuda
    torch.cuda.synchronize()  # the inputs are there: another stream would not wait for them
    with cuda.stream(cuda.Stream()):
        for call in calls:  # compiles, and lets libraries choose
            call()
    torch.cuda.synchronize()
    rounds = max(1, 8 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, stop = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def _alone(call: Call) -> float:
    return microseconds([call])


def measure_ceilings(device: str) -> Ceilings:
    big = device != "cpu"
    x = torch.randn(2**29 if big else 2**16, device=device)
    y = torch.empty_like(x)
    copies: list[Call] = [lambda: y.copy_(x), lambda: torch.neg(x, out=y)]  # by the driver, and by a kernel
    copy = max(2 * x.nbytes / min(map(_alone, copies)), x.nbytes / _alone(x.amax)) * 1e6
    n = 8192 if big else 64
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    flops = 2 * n**3 / microseconds([lambda: a @ b]) * 1e6
    tiny = torch.zeros(1, device=device)
    return Ceilings(copy, flops, microseconds([lambda: tiny.add_(1)] * (500 if big else 1)))


def bytes_figure(what: str, us: float, num_bytes: float, ceilings: Ceilings) -> Figure:
    return Figure(what, us, num_bytes / ceilings.copy * 1e6, num_bytes / us * 1e6, "B")


def flops_figure(what: str, us: float, flops: float, ceilings: Ceilings) -> Figure:
    return Figure(what, us, flops / ceilings.flops * 1e6, flops / us * 1e6, "FLOP")
