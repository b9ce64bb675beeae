"""What can be known before a process starts: can the model folder be served, is the port free. No torch."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from ..coordinator.settings import CoordinatorSettings
from ..engine.errors import EngineError
from ..engine.latency_profile import PACED, Profile
from ..engine.model.model_folder import check_model_folder
from ..engine.settings import WorkerSettings
from ..transport.process.private_files import OpenToOthers, require_private
from .config import ConfigError, flag_of
from .extras import missing_for


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A ``problem`` keeps this machine from serving; a ``note`` makes it slower or
    smaller."""

    level: Literal["ok", "note", "problem"]
    text: str
    advice: str = ""


OUTPUTS = ("output", "json_file", "plot_file", "html_file", "launch_file", "records")
"""Settings that name a file to write."""


def require_model(folder: Path, *, weights: bool = True) -> None:
    """Raises ConfigError if ``folder`` cannot be served."""
    if problem := model_problem(folder, weights=weights):
        raise ConfigError(f"--model: {problem}")


def require_models(coordinator: CoordinatorSettings, *, weights: bool) -> None:
    """Raises ConfigError if one of its models cannot be served."""
    require_model(coordinator.model, weights=weights)
    for other in coordinator.other_models:
        if problem := model_problem(other.model, weights=weights):
            raise ConfigError(f"other_models: {other.model_name}: {problem}")


def require_port(host: str, port: int) -> None:
    """Raises ConfigError if nobody could listen on ``host:port``."""
    if problem := port_problem(host, port):
        raise ConfigError(f"--port: {problem}")


def require_device(worker: WorkerSettings, gpus: int) -> None:
    """Raise ConfigError where the worker's GPUs are not all among the ``gpus`` that torch finds."""
    device, ranks = worker.device, worker.tensor_parallel_size
    if not device.startswith("cuda") and not (device == "auto" and gpus):
        return
    if not gpus:
        raise ConfigError(
            f"--device {device}: torch finds no GPU on this machine; `splitserve doctor` says why, "
            "--device cpu does without"
        )
    if int(device.partition(":")[2] or 0) + ranks > gpus:
        several = f" --tensor-parallel-size {ranks}" if ranks > 1 else ""
        raise ConfigError(f"--device {device}{several}: torch finds {gpus} GPUs, cuda:0 to cuda:{gpus - 1}")


def require_runner(runner: str) -> None:
    """Raises ProfileError where it is paced by a profile that cannot be read."""
    if runner.startswith(PACED):
        Profile.read(Path(runner.removeprefix(PACED)))


def require_writable(settings: BaseModel) -> None:
    """Raise ConfigError if a file that the command writes at its end could not be written, before the work
    begins."""
    for name in OUTPUTS:
        path = getattr(settings, name, None)
        if path is not None and (
            problem := write_problem(path) or (missing_for("plan") if name == "plot_file" else "")
        ):
            raise ConfigError(f"{flag_of(name)}: {problem}")


def read_key(option: str, path: Path | None) -> str:
    """The key in this file, "" where no file is given. Raises ConfigError, also where other users may open
    it."""
    if path is None:
        return ""
    try:
        require_private("the key", [path])
        key = path.read_text(encoding="utf-8").strip()
    except OpenToOthers as error:
        raise ConfigError(f"{option}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{option}: cannot read {path} ({getattr(error, 'strerror', None) or error})"
        ) from error
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{option}: {path} holds no key; `splitserve keys create` prints one")
    return key


def model_problem(folder: Path, *, weights: bool = True) -> str | None:
    """Why this checkpoint folder cannot be served, with what to do; None if it can."""
    try:
        check_model_folder(folder, "needed" if weights else "if there")
    except EngineError as error:
        return str(error)
    return None


def write_problem(path: Path) -> str | None:
    """Why this file could not be written; None if it could."""
    if path.is_dir():
        return f"{path} is a folder; name a file in it"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}; make it first"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{path} cannot be written; its owner is somebody else, or the file system is read-only"
    return None


def port_problem(host: str, port: int) -> str | None:
    """Why nobody could listen on ``host:port``; None if it is free (port 0 always is)."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return (
            f"cannot listen on {host}:{port} ({error.strerror or error}); stop what uses it or choose another"
        )
    return None
