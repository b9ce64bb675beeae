"""The workers of ``splitserve up``: the settings of each, on the devices that are dealt to them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ..engine.settings import WorkerSettings
from ..worker.settings import DecodeSettings, FlexibleSettings, PrefillSettings
from .config import ConfigError, Layer, Sources, Value, build
from .settings import PoolSettings, ServerSettings, UpSettings

FIXED = ("name", "coordinator", "listen", "data_listen", "advertise_host", "memory_shared_by", "health_port")
"""Settings of the roles that ``up`` decides."""

ELSEWHERE = {"listen": "tcp://0.0.0.0:*", "data_listen": "tcp://0.0.0.0:*"}
"""Workers listen for other hosts."""

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")  # dxg: Windows' subsystem for Linux
ANY_GPU = ("auto", "cuda")

_OnDevices = list[PrefillSettings | DecodeSettings]
"""One worker's settings on each of the devices that it may have."""


def workers_of(
    up: UpSettings, coordinator: ServerSettings, flags: Layer, sources: Sources, gpus: int
) -> list[PrefillSettings | DecodeSettings]:
    """Return the settings of all workers: of this machine's with its devices and memory dealt out. Raise
    ConfigError."""
    if up.flexible and up.borrow:
        raise ConfigError("--borrow and --flexible: a worker that borrows can be flipped, too; choose one")
    wanted = []
    for pool, names in pools_of(up):
        own = {**{name: Value(value, f"up.pools: {name}") for name, value in pool.options.items()}, **flags}
        of_both = up.flexible or up.borrow or pool.role == "mixed"
        of_role = PrefillSettings if pool.role == "prefill" else DecodeSettings
        known = (FlexibleSettings if of_both else of_role).model_fields.keys() - set(FIXED)
        if unknown := sorted(pool.options.keys() - known):
            raise ConfigError(f"up.pools: a {pool.role} worker has no setting {unknown[0]!r} of its own")
        wanted += [
            _of_both_roles(name, pool.role, coordinator, own, sources)
            if of_both
            else on_each_device(of_role, name, coordinator, own, sources)
            for name in names
        ]
    if up.on != "here":
        return [each[0].model_copy(update=ELSEWHERE) for each in wanted]
    return _sharing(_on_devices(wanted, gpus))


def _on_devices(wanted: list[_OnDevices], gpus: int) -> list[PrefillSettings | DecodeSettings]:
    """Those that compute on the devices that are dealt to them."""
    choices = {
        each[0].name: [worker.device for worker in each] for each in wanted if each[0].runner == "model"
    }
    dealt = deal(choices, gpus)
    return [each[0].model_copy(update={"device": dealt.get(each[0].name, each[0].device)}) for each in wanted]


def _sharing(workers: list[PrefillSettings | DecodeSettings]) -> list[PrefillSettings | DecodeSettings]:
    """Each gets an equal part of this host's memory, and of a GPU's that several are on."""
    computing = [worker for worker in workers if worker.runner == "model"]
    on = Counter(worker.device for worker in computing if worker.device.startswith("cuda"))
    return [
        worker.model_copy(
            update={
                "memory_shared_by": max(1, len(computing)),
                "gpu_memory_utilization": worker.gpu_memory_utilization / max(1, on[worker.device]),
            }
        )
        for worker in workers
    ]


def pools_of(up: UpSettings) -> Iterator[tuple[PoolSettings, list[str]]]:
    """Return each pool with its workers' names; workers that change their roles are named by number alone."""
    own = (
        PoolSettings(role="prefill", count=up.prefill, sbatch=up.sbatch_prefill, ray=up.ray_prefill),
        PoolSettings(role="decode", count=up.decode, sbatch=up.sbatch_decode, ray=up.ray_decode),
        PoolSettings(role="mixed", count=up.mixed),
    )
    numbers = defaultdict[str, Iterator[int]](count)
    for pool in (*own, *up.pools):
        called = "worker" if up.flexible and pool.role != "mixed" else pool.role
        yield pool, [f"{called}-{next(numbers[called])}" for _ in range(pool.count)]


def _of_both_roles(
    name: str, start_as: str, coordinator: ServerSettings, flags: Layer, sources: Sources
) -> _OnDevices:
    """An option for one role is for that role's part of a worker's settings."""
    options_of_both = {
        name: value for name, value in flags.items() if not name.startswith(("prefill_", "decode_"))
    }
    for flag, value in flags.items():
        prefix, _, field = flag.partition("_")
        if prefix in ("prefill", "decode") and field:
            if field in WorkerSettings.model_fields or flag == "prefill_max_num_seqs":
                raise ConfigError(
                    f"--{flag.replace('_', '-')}: workers that are of both roles, or can be, have "
                    f"one --{field.replace('_', '-')} for both"
                )
            options_of_both[field] = value
    borrow = name.startswith(("prefill", "decode"))
    return [
        worker.model_copy(update={"start_as": start_as, "borrow": borrow})
        for worker in on_each_device(FlexibleSettings, name, coordinator, options_of_both, sources)
    ]


def on_each_device(
    model: type[PrefillSettings] | type[DecodeSettings],
    name: str,
    coordinator: ServerSettings,
    flags: Layer,
    sources: Sources,
) -> _OnDevices:
    """A worker's settings: flags for its role, flags for all workers, environment and file; then what ``up``
    decides."""
    prefix = f"{model.role}_"
    for_role = {flag.removeprefix(prefix): value for flag, value in flags.items() if flag.startswith(prefix)}
    fixed: dict[str, Any] = {
        "model": coordinator.model,
        "revision": "",
        "name": name,
        "coordinator": coordinator.control_address.replace("//0.0.0.0:", "//127.0.0.1:"),
        "key_file": coordinator.key_file,
        "insecure": coordinator.insecure,
        "max_model_len": coordinator.max_model_len,
    }
    decided = {field: Value(value, "up") for field, value in fixed.items()}
    layers = [
        {k: v for k, v in layer.items() if k not in FIXED}
        for layer in (for_role, only(model, flags), *sources.of(model.role))
    ]
    device = next((layer["device"] for layer in layers if "device" in layer), None)
    if device is None:
        return [build(model, [decided, *layers])]
    named = [Value(name, device.origin) for name in str(device.value).split(",")]
    return [build(model, [{**decided, "device": one}, *layers]) for one in named]


def only(model: type[BaseModel], layer: Layer) -> Layer:
    return {name: value for name, value in layer.items() if name in model.model_fields}


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
