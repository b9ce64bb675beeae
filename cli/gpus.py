"""Which GPU each worker of ``splitserve up`` computes on: one of its own, as far as there are enough."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")  # dxg: Windows' subsystem for Linux
ANY_GPU = ("auto", "cuda")


def num_gpus(devices: Sequence[str]) -> int:
    """Return the number of GPUs that torch finds, or 0 where none of these devices could be one. Torch is
    asked in a process of its own, so that the supervisor holds neither torch nor a GPU; for ``auto`` only
    where there is a driver, since that takes seconds."""
    named = any(device.startswith("cuda") for device in devices)
    if not named and not ("auto" in devices and any(map(Path.exists, map(Path, DRIVER_FILES)))):
        return 0
    question = "import torch; print(torch.cuda.device_count())"
    asked = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    return int(asked.stdout) if asked.returncode == 0 else 0


def deal(wanted: Mapping[str, Sequence[str]], gpus: int) -> dict[str, str]:
    """Return a device for each worker, of those that it may have; ``auto`` and ``cuda`` stand for any of
    ``gpus`` GPUs. Each gets the device with the fewest workers; workers with the least choice go first."""
    choices = {
        worker: [each for name in devices for each in _meant(name, gpus)]
        for worker, devices in wanted.items()
    }
    dealt, taken = dict.fromkeys(wanted, ""), Counter[str]()
    for worker in sorted(choices, key=lambda worker: len(choices[worker])):
        dealt[worker] = min(choices[worker], key=lambda device: taken[device])
        taken[dealt[worker]] += 1
    return dealt


def shared(devices: Mapping[str, str]) -> str:
    """Return which workers share a GPU, as a sentence; empty if none do. ``devices``: by worker."""
    on: dict[str, list[str]] = {}
    for worker, device in devices.items():
        if device.startswith("cuda"):
            on.setdefault(device, []).append(worker)
    sentences = [
        f"{', '.join(workers[:-1])} and {workers[-1]} share {device}"
        for device, workers in on.items()
        if len(workers) > 1
    ]
    return (
        "; ".join(sentences)
        + ": each holds weights and a KV cache of its own there, in its part of --gpu-memory-utilization"
        if sentences
        else ""
    )


def _meant(device: str, gpus: int) -> list[str]:
    return [f"cuda:{number}" for number in range(gpus)] if device in ANY_GPU and gpus else [device]
