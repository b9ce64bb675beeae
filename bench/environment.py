"""What each bench begins with: its options, and the machine, versions and date of its figures."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("torch", "pyzmq", "uvicorn", "uvloop", "pydantic", "msgspec", "tokenizers", "numpy")


def option_parser(doc: str | None, *, to_json: bool = False) -> argparse.ArgumentParser:
    """A parser whose help begins with the module's docstring, as it stands there; with an option for
    ``write_record``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if to_json:
        parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser


def write_record(path: Path | None, record: Mapping[str, object]) -> None:
    """Write it if ``--json`` named a path. A list of numbers takes one line."""
    if path is not None:
        text = re.sub(
            r"\[[-\d.e,\s]+\]", lambda found: " ".join(found[0].split()), json.dumps(record, indent=1)
        )
        path.write_text(text + "\n")


def environment() -> dict[str, object]:
    """Date, processor, versions, commit and command line: what a recorded result needs to be read later."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "load_average": os.getloadavg(),  # before this began: above zero, the machine was shared
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo").read_text()
    name = next(
        (line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")),
        platform.machine(),
    )
    flags = set(
        next((line.partition(":")[2] for line in info.splitlines() if line.startswith("flags")), "").split()
    )
    return f"{name} ({', '.join(f for f in ('avx2', 'avx512f', 'avx512_bf16', 'amx_bf16') if f in flags)})"


def _commit() -> str:
    folder = Path(__file__).resolve().parent
    built = folder.parent / "cli" / "commit.txt"  # in a wheel and in the bundle of gpu_check
    if built.exists():
        return built.read_text().strip()
    if shutil.which("git") is None:
        return "unknown"
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else sys.argv[0]
