"""The device of a worker: which one and its dtype, the memory that is free, and copies that do not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from ..kernels.select import cpu_multiplies_bfloat16, cpu_widens_bfloat16, kernels_in_words
from .errors import ModelConfigError, OutOfMemoryError, is_out_of_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 where there is no limit
ALIGNED = 16  # bytes; Triton compiles a kernel anew for a pointer that is less aligned
CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
Arrival = Callable[[], Sequence[Tensor]]
Model = TypeVar("Model")


def select_device(name: str, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """``name``: of rank 0; where that is a GPU, the others have those after it. Raises ModelConfigError."""
    device = _first_device(name)
    if device.type == "cpu" or num_ranks == 1:
        return device
    number, count = (device.index or 0) + rank, torch.cuda.device_count()
    if number >= count:
        raise ModelConfigError(
            f"--tensor-parallel-size {num_ranks} from --device {name} on needs cuda:{number}, but torch "
            f"finds {count} GPUs: lower it"
        )
    return torch.device("cuda", number)


def _first_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ModelConfigError(f"device {name!r} is not supported (supported: auto, cpu, cuda, cuda:N)")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelConfigError(
            "device cuda was asked for, but torch finds none; install a CUDA build of torch, or use --device "
            "cpu"
        )
    return device


def select_dtype(name: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """auto: bfloat16 on GPUs and where the CPU multiplies bfloat16 itself (AVX512-BF16, AMX); on other CPUs
    too where the checkpoint is ``stored`` in bfloat16 (decode reads half as much, prefill is no slower:
    bench/results/engine.json); float32 otherwise."""
    if name == "auto":
        if device.type == "cuda" or cpu_multiplies_bfloat16():
            return torch.bfloat16
        return torch.bfloat16 if stored == torch.bfloat16 and cpu_widens_bfloat16() else torch.float32
    if name not in DTYPES:
        raise ModelConfigError(f"dtype {name!r} is not supported (supported: auto, {', '.join(DTYPES)})")
    if name == "float16" and device.type == "cpu":
        raise ModelConfigError("dtype float16 is not supported on CPUs; use bfloat16 or float32")
    return DTYPES[name]


def available_bytes(device: torch.device) -> int:
    """Memory that is free now: the card's, or the host's within its container's limits."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def free_host_bytes() -> int:
    """Memory that this process could still take: the host's available memory, or what its container's limits
    leave of it."""
    left = [int(psutil.virtual_memory().available), *(_left(*cgroup) for cgroup in cgroups("memory"))]
    return max(0, min(left))


def cgroups(controller: str) -> Iterator[tuple[Path, bool]]:
    """(folder, whether it is of version 2) of each cgroup over this process that may limit this."""
    try:
        lines = CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = CGROUP_ROOT / controller if controllers else CGROUP_ROOT
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            yield folder, not controllers
            if folder == top:
                break


def _left(folder: Path, is_v2: bool) -> int:
    """Bytes below one cgroup's limit; page cache that the kernel gives back counts as free."""
    names = ("max", "current") if is_v2 else ("limit_in_bytes", "usage_in_bytes")
    try:
        most, used = (int((folder / f"memory.{name}").read_text()) for name in names)
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such cgroup, or "max"
        return UNLIMITED
    reclaimable = stat.get("inactive_file" if is_v2 else "total_inactive_file", 0)
    return most - used + int(reclaimable) if most < UNLIMITED else UNLIMITED


def bring(tensors: Sequence[Tensor]) -> Arrival:
    """Begin to copy to the host; the call that it returns waits for these copies, but not for steps that are
    launched later. Tensors of a CPU are returned as they are."""
    if not tensors or not tensors[0].is_cuda:
        return lambda: tensors
    host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
    done = mark_stream()

    def arrived() -> Sequence[Tensor]:
        done.synchronize()
        return host

    return arrived


def loaded_on(device: torch.device, make: Callable[[], Model]) -> Model:
    """Return ``make()``, a part of the model with its weights. Raises OutOfMemoryError."""
    free = available_bytes(device)
    try:
        return make()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"the model's weights do not fit on {device}, where {free / 2**30:.2f} GiB were free "
            f"({error}); end what else uses that memory, lower --gpu-memory-utilization of the workers that "
            "share the GPU, use --quantization fp8, int8 or int4, or serve a smaller model"
        ) from error


def mark_stream(blocking: bool = False) -> torch.cuda.Event:
    """Record an event in the current CUDA stream. ``blocking``: a wait for it takes no core."""
    event = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream())
    return event


def passed(device: torch.device) -> Callable[[], None]:
    """Return a call that waits until the device has done what was launched so far, but nothing that is
    launched later."""
    if device.type != "cuda":
        return lambda: None
    done = mark_stream()
    return done.synchronize


def send(values: Tensor, device: torch.device) -> Tensor:
    """Copy these host values to the device without waiting for it; on a CPU, return them."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def send_all(columns: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """As ``send``, all of them in one copy."""
    if device.type != "cuda":
        return dict(columns)
    starts = [0]
    for column in columns.values():
        starts.append(starts[-1] + -(-column.nbytes // ALIGNED) * ALIGNED)
    host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)

    def views(run: Tensor) -> dict[str, Tensor]:
        return {
            name: run[start : start + column.nbytes].view(column.dtype).view(column.shape)
            for start, (name, column) in zip(starts, columns.items(), strict=False)
        }

    for name, view in views(host).items():
        view.copy_(columns[name])
    return views(host.to(device, non_blocking=True))


def cpu_kernels_in_words() -> str:
    """Which kernels multiply on this CPU; measures where that is not yet known."""
    return kernels_in_words()
