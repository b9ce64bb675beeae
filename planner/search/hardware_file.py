"""Kinds of workers from a YAML file, or from an inventory of GPUs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ...engine.latency_profile import Power, Profile, ProfileError, StepRole
from ..errors import SimulationError
from ..simulator.cluster import read_yaml
from ..simulator.slo import NOTATION
from .candidates import Hardware, Kind

DEGREES = (1, 2, 4, 8)
"""GPUs that a worker of an inventory may span: those of one host."""


class _Entry(BaseModel):
    """``gpus``: that there are at most. What is not given is taken from the profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: Path
    name: str | None = None
    gpus_per_worker: Annotated[int, Field(ge=1, le=1024)] | None = None
    gpus: Annotated[int, Field(ge=1)] | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None  # of one worker
    power: Power | None = None  # of one worker
    roles: tuple[StepRole, ...] = ("prefill", "decode")


class ModelLoad(BaseModel):
    """A further model of an inventory, with its load, as in the settings of `splitserve plan`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trace: Path
    profile: Path
    slo: Annotated[str, Field(pattern=NOTATION)]


def read_hardware(path: Path) -> Hardware:
    """Raises SimulationError."""
    content = read_yaml(path, "the hardware")
    try:
        entries = TypeAdapter(list[_Entry]).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise SimulationError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if not entries:
        raise SimulationError(f"{path} lists no hardware; it needs a list of entries with a `profile` each")
    kinds = tuple(_kind(path, entry) for entry in entries)
    if not any(k.prefills for k in kinds) or not any(k.decodes for k in kinds):
        lacking = "decode" if any(k.prefills for k in kinds) else "prefill"
        raise SimulationError(f"{path}: nothing may {lacking}; widen some entry's `roles`")
    return Hardware(kinds)


def stocks_of(inventory: str) -> tuple[tuple[str, int], ...]:
    """GPUs of each name in ``16xh100:2.5 8xa100``."""
    stocks = Counter[str]()
    for num, gpu in re.findall(r"(\d+)x(\w+)", inventory):
        stocks[gpu] += int(num)
    return tuple(stocks.items())


def prices_of(inventory: str) -> dict[str, float]:
    """Price of an hour of one GPU, of each name that has one."""
    return {gpu: float(price) for gpu, price in re.findall(r"x(\w+):([\d.]+)", inventory)}


def of_inventory(models: str, inventory: str) -> Hardware:
    """Workers of each model (names with commas) on 1, 2, 4 and 8 of each GPU, as far as its weights fit.

    Raises ProfileError where they fit nowhere."""
    kinds, refused, prices = list[Kind](), list[ProfileError](), prices_of(inventory)
    for gpu, num in stocks_of(inventory):
        for model, gpus in product(models.split(","), [n for n in DEGREES if n <= num]):
            try:
                kind = Kind.of(Profile.read(Path(f"{model}@{gpus}x{gpu}")), gpus, gpu)
                kinds.append(replace(kind, price_per_hour=gpus * prices[gpu]) if gpu in prices else kind)
            except ProfileError as error:
                refused.append(error)
    if not kinds:
        raise refused[-1]
    return Hardware(tuple(kinds))


def _kind(path: Path, entry: _Entry) -> Kind:
    profile = Profile.read(path.parent / entry.profile)
    gpus_per_worker = entry.gpus_per_worker or profile.gpus
    return Kind(
        entry.name or profile.hardware or profile.name,
        profile,
        gpus_per_worker,
        profile.price_per_hour if entry.price_per_hour is None else entry.price_per_hour,
        entry.power or profile.power,
        "prefill" in entry.roles,
        "decode" in entry.roles,
        None if entry.gpus is None else entry.gpus // gpus_per_worker,
    )
