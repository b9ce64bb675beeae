"""The workers of ``splitserve up``: the settings of each, on the devices that are dealt to them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pydantic import BaseModel

from ..engine.settings import WorkerSettings
from ..worker.settings import DecodeSettings, FlexibleSettings, PrefillSettings
from .config import ConfigError, Layer, Sources, Value, build
from .gpus import deal
from .settings import ServerSettings, UpSettings

FIXED = ("name", "coordinator", "listen", "data_listen", "advertise_host", "memory_shared_by", "health_port")
"""Settings of the roles that ``up`` decides."""

ELSEWHERE = {"listen": "tcp://0.0.0.0:*", "data_listen": "tcp://0.0.0.0:*"}
"""Decode workers listen for other hosts."""

_OnDevices = list[PrefillSettings | DecodeSettings]
"""One worker's settings on each of the devices that it may have."""


def workers_of(
    up: UpSettings, coordinator: ServerSettings, flags: Layer, sources: Sources, gpus: int
) -> list[PrefillSettings | DecodeSettings]:
    """Return the settings of all workers: of this machine's with its devices and memory dealt out. Raise
    ConfigError."""
    if up.flexible and up.borrow:
        raise ConfigError("--borrow and --flexible: a worker that borrows keeps its role; choose one")
    if up.borrow:
        wanted = [
            *_of_both_roles("prefill", up.prefill, coordinator, flags, sources, "prefill"),
            *_of_both_roles("decode", up.decode, coordinator, flags, sources, "decode"),
        ]
    elif up.flexible:
        wanted = [  # each named by its number
            *_of_both_roles("worker", up.prefill, coordinator, flags, sources, "prefill"),
            *_of_both_roles("worker", up.decode, coordinator, flags, sources, "decode", first=up.prefill),
        ]
    else:
        wanted = [
            on_each_device(model, f"{role}-{index}", coordinator, flags, sources)
            for role, model, count in (
                ("prefill", PrefillSettings, up.prefill),
                ("decode", DecodeSettings, up.decode),
            )
            for index in range(count)
        ]
    wanted += _of_both_roles("mixed", up.mixed, coordinator, flags, sources, "mixed")
    if up.on != "here":
        return [each[0].model_copy(update=ELSEWHERE if each[0].role != "prefill" else {}) for each in wanted]
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


def _of_both_roles(
    called: str,
    count: int,
    coordinator: ServerSettings,
    flags: Layer,
    sources: Sources,
    start_as: str,
    first: int = 0,
) -> list[_OnDevices]:
    """An option for one role is for that role's part of a worker's settings."""
    if not count:
        return []
    options_of_both = {
        name: value for name, value in flags.items() if not name.startswith(("prefill_", "decode_"))
    }
    for flag, value in flags.items():
        prefix, _, name = flag.partition("_")
        if prefix in ("prefill", "decode") and name:
            if name in WorkerSettings.model_fields or flag == "prefill_max_num_seqs":
                raise ConfigError(
                    f"--{flag.replace('_', '-')}: workers that are of both roles, or can be, have "
                    f"one --{name.replace('_', '-')} for both"
                )
            options_of_both[name] = value
    workers = [
        on_each_device(FlexibleSettings, f"{called}-{first + index}", coordinator, options_of_both, sources)
        for index in range(count)
    ]
    return [
        [
            worker.model_copy(update={"start_as": start_as, "borrow": called in ("prefill", "decode")})
            for worker in each
        ]
        for each in workers
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
