"""``splitserve doctor``: look at everything that commonly keeps a machine from serving, and name the
remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import signal
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from urllib.parse import urlsplit

from rich.console import Console

from ...coordinator.run_folder import find_door
from ..checks import Finding, model_problem, port_problem
from ..config import ConfigError
from ..extras import missing_for
from ..model_source import with_folder
from ..settings import DEMO_MODEL, DoctorSettings
from .peer_check import check_peer
from .peer_listener import DEFAULT_PORT

GIB = 1 << 30
MIN_OPEN_FILES = 4096
MARKS = {"ok": "[green]ok[/green]     ", "note": "[yellow]note[/yellow]   ", "problem": "[red]problem[/red]"}


def main(settings: DoctorSettings, console: Console | None = None) -> int:
    """Prints every finding. Returns 1 if one of them keeps this machine from serving."""
    console = console or Console()
    if settings.listen:
        return _listen(settings, console)
    if settings.peer:
        return _report(check_peer(settings), console, "the two hosts can serve together")
    return _report(
        (finding for check in CHECKS for finding in check(settings)), console, "this machine can serve"
    )


def _report(findings: Iterable[Finding], console: Console, good: str) -> int:
    problems = 0
    for finding in findings:
        problems += finding.level == "problem"
        console.print(MARKS[finding.level], end=" ")
        console.print(finding.text, markup=False, highlight=False, soft_wrap=True)
        if finding.advice:
            console.print(f"        -> {finding.advice}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{problems} problem{'s' if problems != 1 else ''}" if problems else good, highlight=False)
    return 1 if problems else 0


def _listen(settings: DoctorSettings, console: Console) -> int:
    """Until a signal."""
    from ...transport.channels.keys import load_key
    from ...transport.errors import AddressError, KeyFileError
    from .peer_listener import Address, PeerListener

    assert settings.key_file is not None, "checked with the settings"
    address = Address.of(settings.listen)
    try:
        with closing(PeerListener(address, load_key(settings.key_file))) as listener:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: listener.stop())
            port = "" if address.port == DEFAULT_PORT else f":{address.port}"
            console.print(
                f"listening on {address.host}, ports {address.port} and {address.port + 1}; now "
                "run on the other host:\n"
                f"    splitserve doctor --peer THIS_HOST{port} --key-file "
                f"{settings.key_file}\nCtrl-C ends it.",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip
            listener.run()
    except (AddressError, KeyFileError) as error:
        return _report([Finding("problem", str(error))], console, "")
    return 0


def check_versions(_: DoctorSettings) -> Iterator[Finding]:
    yield Finding("ok", f"Python {platform.python_version()}")
    for package in (
        "pyzmq",
        "tokenizers",
        "uvicorn",
        "numpy",
        *(() if missing_for("worker") else ("torch",)),
    ):
        try:
            yield Finding("ok", f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding(
                "problem",
                f"{package} is not installed",
                "run deploy/quickstart.sh, or pip install splitserve again",
            )
    if advice := missing_for("worker"):
        yield Finding("note", "this host can run a coordinator, but no worker", advice)


def check_encryption(_: DoctorSettings) -> Iterator[Finding]:
    import zmq

    if zmq.has("curve"):
        yield Finding("ok", f"ZeroMQ {zmq.zmq_version()} with CURVE encryption")
    else:
        yield Finding(
            "problem",
            f"ZeroMQ {zmq.zmq_version()} was built without CURVE",
            "install pyzmq from its wheel, or use --insecure",
        )


def check_devices(_: DoctorSettings) -> Iterator[Finding]:
    if missing_for("worker"):
        return
    import torch

    if not torch.cuda.is_available():
        built = (
            "CPU build of torch"
            if torch.version.cuda is None
            else f"torch for CUDA {torch.version.cuda}, but no GPU is usable"
        )
        yield Finding(
            "ok", f"CPU with {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()} ({built})"
        )
    for name in _gpu_names():
        if torch.version.cuda is None:
            yield Finding(
                "note",
                f"{name}, but torch is a CPU build",
                "remove .venv and run deploy/quickstart.sh to get the CUDA build",
            )
        else:
            yield Finding("ok", name)


def _gpu_names() -> list[str]:
    """What the NVIDIA driver shows; empty where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            (
                f"GPU {index}: {pynvml.nvmlDeviceGetName(handle)}, "
                f"{pynvml.nvmlDeviceGetMemoryInfo(handle).free / GIB:.0f} GiB free"
            )
            for index, handle in enumerate(handles)
        ]
    finally:
        pynvml.nvmlShutdown()


def check_kernels(_: DoctorSettings) -> Iterator[Finding]:
    if missing_for("worker"):
        return
    if importlib.util.find_spec("splitserve.kernels._cpu"):
        from ...engine.device import cpu_kernels_in_words

        try:
            importlib.import_module("splitserve.kernels.native_cpu")
        except ImportError as error:
            yield Finding("note", "C++ kernels for CPUs are of another checkout", str(error))
            return
        yield Finding("ok", f"C++ kernels for CPUs are built: {cpu_kernels_in_words()}")
        from ...engine.cache.memory_claims import MemoryClaims
        from ...engine.cpu_threads import AUTO, choose_threads, cpu_quota, usable_cores

        with MemoryClaims("").turn() as others:
            threads = choose_threads(AUTO, usable_cores(), cpu_quota(), others.cores, 0)
        yield Finding("ok", f"--threads auto would compute with {threads}")
    else:
        compiler = shutil.which("c++") or shutil.which("g++")
        advice = (
            "pip install -e . again to build them"
            if compiler
            else "install g++ (Debian: apt-get install g++), then pip install -e ."
        )
        yield Finding("note", "C++ kernels for CPUs are not built: plain torch serves, more slowly", advice)


def check_ports(settings: DoctorSettings) -> Iterator[Finding]:
    control = urlsplit(settings.control_address)
    ours = _ports_of_ours(settings.host, settings.port)
    for use, host, port in (
        ("HTTP", settings.host, settings.port),
        ("control", control.hostname or "", control.port or 0),
    ):
        if port in ours:
            advice = "nothing to do, unless you mean to start another: then choose other ports"
            yield Finding(
                "note",
                f"{use} port {host}:{port} is used by a splitserve coordinator that runs already",
                advice,
            )
        elif problem := port_problem(host, port):
            yield Finding("problem", f"{use} port: {problem}")
        else:
            yield Finding("ok", f"{use} port {host}:{port} is free")


def _ports_of_ours(host: str, port: int) -> set[int]:
    """The ports of the coordinator of this user whose HTTP server this is; none where there is none."""
    door = find_door(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    return {port, int(door.control_address.rpartition(":")[2])} if door is not None else set()


def check_key(settings: DoctorSettings) -> Iterator[Finding]:
    if settings.key_file is None:
        return
    from ...transport.channels.keys import load_key
    from ...transport.errors import KeyFileError

    try:
        load_key(settings.key_file)
    except KeyFileError as error:
        yield Finding("problem", str(error))
    else:
        mode = stat.S_IMODE(settings.key_file.stat().st_mode)
        yield Finding("ok", f"key file {settings.key_file} (mode {mode:04o})")


def check_limits(_: DoctorSettings) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        yield Finding(
            "note",
            f"only {soft} files may be open, one a client connection",
            f"run `ulimit -n {min(hard, 65536)}` first",
        )
    else:
        yield Finding("ok", f"{soft} files may be open")


def check_model(settings: DoctorSettings) -> Iterator[Finding]:
    try:
        folder = with_folder(settings).model or DEMO_MODEL
    except ConfigError as error:
        yield Finding("problem", str(error))
        return
    if problem := model_problem(folder):
        yield Finding("problem", f"model: {problem}")
        return
    if missing_for("worker"):
        yield Finding("ok", f"model {folder.name}: all files are there; a host with workers looks into them")
        return
    from ...engine.errors import EngineError
    from ...engine.load_model import expected_worker

    try:
        worker = expected_worker(folder)
    except EngineError as error:
        yield Finding("problem", f"model: {error}")
        return
    size, config, dtype = worker.size, worker.config, str(worker.dtype).removeprefix("torch.")
    split = f" on {worker.ranks} GPUs (--tensor-parallel-size {worker.ranks})" * (worker.ranks > 1)
    text = (
        f"model {folder.name}: {config.architecture}, {worker.weights / 1e6:,.0f} MB of weights in {dtype}"
        f"{split}; of two workers here each has a KV cache of {worker.kv_cache / GIB:.2f} GiB, "
        f"{size.num_blocks:,} blocks, and takes sequences of {size.max_model_len:,} tokens"
    )
    if size.max_model_len < config.max_model_len:
        advice = (
            f"the model's own {config.max_model_len:,} tokens need more memory, or a larger "
            "--cpu-memory-utilization"
        )
        yield Finding("note", text, advice)
    else:
        yield Finding("ok", text)


CHECKS: tuple[Callable[[DoctorSettings], Iterator[Finding]], ...] = (
    check_versions,
    check_encryption,
    check_devices,
    check_kernels,
    check_ports,
    check_key,
    check_limits,
    check_model,
)
