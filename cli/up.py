"""What ``splitserve up`` will start: settings of every process, all checked before the first one starts."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from ..coordinator.http.access.operators import admin_key, make_admin_key
from ..coordinator.http.access.url import is_loopback, url_of
from ..coordinator.run_folder import ADMIN_KEY, RunFolder
from ..coordinator.settings import OtherModel
from ..engine.settings import KV_STORE_URL, WorkerSettings
from ..worker.settings import DecodeSettings, PrefillSettings
from .checks import port_problem, read_key, require_device, require_models, require_port, require_runner
from .config import ConfigError, Layer, Sources, Value, build
from .extras import missing_for
from .model_source import with_folders
from .options import options
from .settings import DEMO_MODEL, DEMO_MODEL_NAME, ServerSettings, UpSettings
from .up_workers import FIXED, num_gpus, only, require_both_roles, wanted_workers, workers_of

TEXTS = {
    "model": "Hugging Face checkpoint folder (config.json, tokenizer and safetensors weights), a model of "
    "the hub such as Qwen/Qwen3-0.6B, a GGUF file (needs splitserve[gguf]), or s3://BUCKET/PREFIX (needs "
    "splitserve[s3]). Default: the bundled demo model.",
    "control_address": (
        "Where workers, also those of other hosts, reach the coordinator. Default: a free port of 127.0.0.1."
    ),
    "key_file": "The cluster's key. Default: a new one in the run directory.",
}
DEVICE = {
    "device": "auto, cpu, cuda or cuda:N, or several GPUs to deal out: cuda:0,cuda:1. auto, cuda: each "
    "worker on GPUs of its own, as far as there are enough; where there is none, auto is the CPU."
}
KEY_NAME = "cluster.key"
OPTIONS_OF = {"slurm": ("sbatch", "sbatch_prefill", "sbatch_decode"), "ray": ("ray_prefill", "ray_decode")}


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that ``up`` starts. ``processes``: name and settings, the coordinator first."""

    up: UpSettings
    run_dir: Path
    folder: RunFolder  # ``run_dir`` where none is named
    coordinator: ServerSettings
    workers: list[PrefillSettings | DecodeSettings]  # those that can change their roles are both

    @property
    def url(self) -> str:
        """The HTTP server's URL for a client on this machine."""
        return url_of(self.coordinator.listen_host, self.coordinator.port, self.coordinator.scheme)

    @property
    def models(self) -> list[str]:
        """The models' names, the first one first."""
        return [model.model_name for model in self.coordinator.each_model()]

    @property
    def asked_for_ready(self) -> tuple[Path | None, list[str], int]:
        """What ``is_ready`` takes beside the address."""
        return self.coordinator.tls_cert, self.models, self.coordinator.processes

    @property
    def summary(self) -> str:
        """What is started, as a sentence."""
        mixed = f", and {self.up.mixed} of both roles" if self.up.mixed else ""
        others = sum(pool.count for pool in self.up.pools)
        more = f", and {others} in further pools" if others else ""
        workers = f"{self.up.prefill} prefill and {self.up.decode} decode workers{mixed}{more}"
        return f"starting {' and '.join(self.models)}: coordinator, {workers} ..."

    @property
    def admin_key(self) -> str:
        """The coordinator's admin key."""
        assert self.coordinator.admin_key_file is not None, "plan() has made one"
        return admin_key(self.coordinator.admin_key_file)


def up_options() -> list[click.Parameter]:
    """Options of ``up``: its own, the coordinator's, the workers' (also for one role only)."""
    shared = set(WorkerSettings.model_fields) & set(ServerSettings.model_fields)
    own = {
        role: [
            name
            for name in model.model_fields
            if name not in WorkerSettings.model_fields and name not in FIXED
        ]
        for role, model in (("prefill", PrefillSettings), ("decode", DecodeSettings))
    }
    return [
        *options(UpSettings, group="What to start"),
        *options(ServerSettings, group="Model and HTTP server", texts=TEXTS),
        *options(WorkerSettings, group="Workers", skip={*shared, *FIXED}, texts=DEVICE),
        *options(
            PrefillSettings,
            group="Prefill workers",
            prefix="prefill_",
            skip=set(PrefillSettings.model_fields) - set(own["prefill"]),
        ),
        *options(
            DecodeSettings,
            group="Decode workers",
            prefix="decode_",
            skip=set(DecodeSettings.model_fields) - set(own["decode"]),
        ),
        *options(WorkerSettings, prefix="prefill_", skip={*shared, *FIXED}, hidden=True),
        *options(WorkerSettings, prefix="decode_", skip={*shared, *FIXED}, hidden=True),
    ]


def plan(flags: Layer, sources: Sources) -> Plan:
    """Settings of all processes. Makes the run directory and the cluster's key. Raises ConfigError."""
    up = build(UpSettings, [only(UpSettings, flags), *sources.of("up")])
    _require_sense(up, flags)
    here = up.on == "here"
    coordinator, makes_key = _coordinator(up, flags, sources)
    if coordinator.control_address.endswith(":0"):
        control = f"tcp://127.0.0.1:{free_ports(coordinator.processes)}"
        coordinator = coordinator.model_copy(update={"control_address": control})
    others = tuple(map(_on_a_port, coordinator.other_models))
    coordinator = coordinator.model_copy(update={"other_models": others})
    require_both_roles(up, coordinator)
    wanted = wanted_workers(up, coordinator, flags, sources)
    computing = [one for each in wanted for one in each if one.runner == "model"]
    coordinator = with_folders(coordinator, weights=bool(computing))
    require_models(coordinator, weights=bool(computing))
    if makes_key and up.run_dir is None and any(each[0].kv_store for each in wanted):
        raise ConfigError(
            "--kv-store: what is stored can be read with the same cluster key only, and this cluster would "
            "get a new one at each start: give --key-file or --run-dir"
        )
    stores = {each[0].kv_store for each in wanted}
    if here and any(map(KV_STORE_URL.fullmatch, stores)) and (advice := missing_for("object-store")):
        raise ConfigError(f"--kv-store: {advice}")
    gpus = num_gpus([worker.device for worker in computing]) if here else 0
    for worker in computing if here else []:
        require_device(worker, gpus)
    if here:
        require_port(coordinator.listen_host, coordinator.port)
    folder = _run_folder()
    run_dir = _run_dir(up.run_dir) if up.run_dir is not None else folder.path
    made: dict[str, object] = {
        "model": coordinator.model.resolve(),
        "other_models": tuple(
            other.model_copy(update={"model": other.model.resolve()}) for other in coordinator.other_models
        ),
        "port": coordinator.port or free_port(coordinator.listen_host),
    }
    if makes_key:
        made["key_file"] = _own_key(run_dir)
    if coordinator.admin_key_file is None:
        made["admin_key_file"] = _own_admin_key(run_dir)
    coordinator = coordinator.model_copy(update=made)
    workers = workers_of(up, wanted_workers(up, coordinator, flags, sources), gpus)
    for runner in {worker.runner for worker in workers}:
        require_runner(runner)
    if coordinator.steer != "off":  # scaling down leaves alone what would be started again
        keep = [*filter(None, [coordinator.steer_keep]), *(worker.name for worker in workers)]
        coordinator = coordinator.model_copy(update={"steer_keep": ",".join(keep)})
    return Plan(up, run_dir, folder, coordinator, workers)


def _require_sense(up: UpSettings, flags: Layer) -> None:
    """Raises ConfigError where what was asked of ``up`` lacks a package, or contradicts itself."""
    if advice := missing_for("worker") or (missing_for("cli") if up.chat and sys.stdin.isatty() else ""):
        raise ConfigError(advice)
    if up.chat and up.prompt is not None:
        raise ConfigError("--prompt asks one question, --chat asks for yours: give one of them")
    if up.on != "here":
        _require_elsewhere(up)
    elif up.stop or up.roll:
        option = "--stop" if up.stop else "--roll"
        raise ConfigError(f"{option} is for processes elsewhere: give --on slurm or --on ray")
    if up.stop and up.roll:
        raise ConfigError("--stop ends what --roll would start again: give one of them")
    for manager, names in OPTIONS_OF.items():
        if manager != up.on and (wrong := [name for name in names if name in flags and getattr(up, name)]):
            raise ConfigError(f"--{wrong[0].replace('_', '-')} is for --on {manager}")


def _on_a_port(other: OtherModel) -> OtherModel:
    if not other.control_address.endswith(":0"):
        return other
    return other.model_copy(update={"control_address": f"tcp://127.0.0.1:{free_port('127.0.0.1')}"})


def _require_elsewhere(up: UpSettings) -> None:
    """Raises ConfigError."""
    if up.on == "ray" and (advice := missing_for("ray")):
        raise ConfigError(advice)
    if up.run_dir is None:
        raise ConfigError(f"--on {up.on} needs --run-dir: a folder for the cluster's key, settings and logs")
    if up.chat or up.prompt is not None:
        raise ConfigError(
            f"--on {up.on}: instead of --chat and --prompt use `splitserve chat --url` afterwards"
        )


def _coordinator(up: UpSettings, flags: Layer, sources: Sources) -> tuple[ServerSettings, bool]:
    """The coordinator's settings, and whether ``up`` makes the cluster's key. Raises ConfigError where the
    cluster's clients could not use it."""
    here = up.on == "here"
    derived = {
        "model": Value(DEMO_MODEL, "the bundled model"),
        "control_address": Value("tcp://127.0.0.1:0" if here else "tcp://0.0.0.0:7700", "up"),
    }
    key = read_key("--api-key-file", up.api_key_file)
    layers = [only(ServerSettings, flags), *sources.of("coordinator")]
    makes_key = not any({"key_file", "insecure"} & set(layer) for layer in layers)
    if makes_key:
        derived["key_file"] = Value(KEY_NAME, "up")
    if not any("model" in layer for layer in layers):
        derived["served_model_name"] = Value(DEMO_MODEL_NAME, "the bundled model")
    coordinator = build(ServerSettings, [*layers, derived])
    if coordinator.tenants_file is not None and (up.chat or up.prompt is not None) and not key:
        raise ConfigError(
            "--chat and --prompt need --api-key-file where --tenants-file asks for keys; "
            "`splitserve keys create` makes one"
        )
    if not here and (coordinator.control_address.endswith(":0") or not coordinator.port):
        raise ConfigError(
            f"--control-address needs a port, and --port one too: with --on {up.on} 0 cannot be found"
        )
    for other in () if here else coordinator.other_models:
        if other.control_address.endswith(":0"):
            raise ConfigError(
                f"control_address of {other.model_name} needs a port: with --on {up.on} 0 cannot be found"
            )
    if not here and not up.stop and is_loopback(coordinator.listen_host):
        raise ConfigError(
            f"--on {up.on}: clients come from other hosts, and this serves its own alone: give "
            "--host 0.0.0.0, and --tenants-file or --open-access"
        )
    return coordinator, makes_key


def _run_folder() -> RunFolder:
    """Raises ConfigError where it cannot be made."""
    try:
        return RunFolder()
    except OSError as error:
        raise ConfigError(f"cannot make a folder for this run: {error}") from error


def _run_dir(named: Path) -> Path:
    """Raises ConfigError where it cannot be made."""
    try:
        named.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"--run-dir: cannot make the folder {named} ({error.strerror or error}); name another"
        ) from error
    return named.resolve()


def _own_key(run_dir: Path) -> Path:
    from ..transport.channels.keys import generate_key

    path = run_dir / KEY_NAME
    if not path.exists():
        generate_key(path)
    return path


def _own_admin_key(run_dir: Path) -> Path:
    """Raises ConfigError where other users may read it."""
    path = run_dir / ADMIN_KEY
    try:
        if not path.exists():
            return make_admin_key(path)
        admin_key(path)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    return path


def free_port(host: str) -> int:
    """A TCP port that nothing listens on at the moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def free_ports(count: int) -> int:
    """Return the first of ``count`` TCP ports of 127.0.0.1 in a row that nothing listens on at the moment."""
    for _ in range(100):
        first = free_port("127.0.0.1")
        ports = range(first, first + count)
        if ports.stop <= 65_536 and all(port_problem("127.0.0.1", port) is None for port in ports):
            return first
    raise ConfigError(f"there are no {count} free ports in a row on 127.0.0.1; give --control-address")
