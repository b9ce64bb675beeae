"""The workers of ``splitserve up``: the settings of each, on the devices that are dealt to them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
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

_Workers = list[PrefillSettings | DecodeSettings]
_OnDevices = _Workers
"""One worker's settings on each of the devices that it may have."""


def wanted_workers(
    up: UpSettings, coordinator: ServerSettings, flags: Layer, sources: Sources
) -> list[_OnDevices]:
    """Return the settings of all workers, each on every device that it may have. Raise ConfigError."""
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
        served = of_pool(pool, coordinator)
        wanted += [
            _of_both_roles(name, pool.role, served, own, sources)
            if of_both
            else on_each_device(of_role, name, served, own, sources)
            for name in names
        ]
    return wanted


def workers_of(up: UpSettings, wanted: list[_OnDevices], gpus: int) -> _Workers:
    """Return the settings of all workers: of this machine's with its devices and memory dealt out."""
    if up.on != "here":
        return [each[0].model_copy(update=ELSEWHERE) for each in wanted]
    return _sharing(deal(wanted, gpus))


def _sharing(workers: _Workers) -> _Workers:
    """Each gets an equal part of this host's memory, and of the GPU of its own that most are on."""
    on = Counter(gpu for worker in workers for gpu in gpus_of(worker))
    part = {"memory_shared_by": max(1, sum(worker.runner == "model" for worker in workers))}
    return [
        worker.model_copy(
            update={**part, "gpu_memory_utilization": worker.gpu_memory_utilization / max(sharers, default=1)}
        )
        for worker in workers
        for sharers in [[on[gpu] for gpu in gpus_of(worker)]]
    ]


def gpus_of(worker: WorkerSettings) -> list[str]:
    """Return the GPUs on which a worker computes, one after the other; none on a CPU."""
    if worker.runner != "model" or not worker.device.startswith("cuda"):
        return []
    first = int(worker.device.partition(":")[2] or 0)
    return [f"cuda:{first + rank}" for rank in range(worker.tensor_parallel_size)]


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


def require_both_roles(up: UpSettings, coordinator: ServerSettings) -> None:
    """Raises ConfigError where a model would lack workers of a role, or a pool is of no model."""
    started: dict[str, set[str]] = {model.model_name: set() for model in coordinator.each_model()}
    for pool, names in pools_of(up):
        started[of_pool(pool, coordinator).model_name] |= {pool.role} if names else set()
    for name, roles in started.items():
        if "mixed" in roles or len(roles) == 2:
            continue
        missing = "decode" if "prefill" in roles else "prefill"
        if name == coordinator.model_name:
            raise ConfigError(f"--{missing} is 0: start one at least, or workers of both roles by --mixed")
        raise ConfigError(f"up.pools has no {missing} workers of {name}: add a pool with `model: {name}`")


def of_pool(pool: PoolSettings, coordinator: ServerSettings) -> ServerSettings:
    """Return the coordinator's settings for the pool's model. Raises ConfigError."""
    models = coordinator.each_model()
    for model in models:
        if not pool.model or pool.model in model.names:
            return model
    known = ", ".join(model.model_name for model in models)
    raise ConfigError(f"up.pools: there is no model {pool.model!r}; the coordinator has {known}")


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


def deal(wanted: list[_OnDevices], gpus: int) -> _Workers:
    """Return each worker on one of the devices that it may have, the first of its GPUs; ``auto`` and ``cuda``
    stand for any of ``gpus`` GPUs. Each gets those with the fewest workers; workers with the least choice,
    such as those of many GPUs, go first."""
    choices = [[one for named in each for one in _meant(named, gpus)] for each in wanted]
    dealt, taken = dict[int, PrefillSettings | DecodeSettings](), Counter[str]()

    def crowd(worker: WorkerSettings) -> tuple[int, int]:
        on = [taken[place] for place in _places(worker)]
        return max(on), sum(on)

    for i in sorted(range(len(choices)), key=lambda i: len(choices[i])):
        dealt[i] = min(choices[i], key=crowd)
        taken.update(_places(dealt[i]))
    return [dealt[i] for i in range(len(choices))]


def shared(workers: Sequence[WorkerSettings]) -> str:
    """Return which workers share GPUs, as a sentence; empty if none do."""
    on, together = defaultdict[str, list[str]](list), defaultdict[tuple[str, ...], list[str]](list)
    for worker in workers:
        for gpu in gpus_of(worker):
            on[gpu].append(worker.name)
    for gpu, names in on.items():
        together[tuple(names)].append(gpu)
    sentences = [f"{_all(names)} share {_all(those)}" for names, those in together.items() if len(names) > 1]
    of_each = ": each holds weights and a KV cache of its own there, in its part of --gpu-memory-utilization"
    return "; ".join(sentences) + of_each if sentences else ""


def _all(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _meant(worker: PrefillSettings | DecodeSettings, gpus: int) -> _OnDevices:
    """The worker on each device that its own stands for. Groups of GPUs that begin at a multiple of their
    size come first: those of 1, 2, 4 and 8 fit together."""
    if worker.device not in ANY_GPU or worker.runner != "model" or not gpus:
        return [worker]
    ranks = worker.tensor_parallel_size
    firsts = sorted(range(gpus - ranks + 1), key=lambda first: first % ranks > 0)
    return [worker.model_copy(update={"device": f"cuda:{first}"}) for first in firsts]


def _places(worker: WorkerSettings) -> list[str]:
    return gpus_of(worker) or [f"{worker.runner} on {worker.device}"]  # one that is paced is on no GPU
