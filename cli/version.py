"""The text of ``splitserve version``: everything in which installations differ."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

from .. import __version__
from ..transport.messages.fields import WIRE_VERSION

COMMIT_FILE = Path(__file__).parent / "commit.txt"
"""Written by setup.py into a wheel."""


def version_text() -> str:
    """Version, wire version, build, Python, where the files are (monitoring among them), and the main
    libraries."""
    lines = [
        f"splitserve {__version__}",
        f"wire {WIRE_VERSION}",
        f"build {build()}",
        f"Python {platform.python_version()} on {platform.machine()}",
        f"files in {COMMIT_FILE.parents[1]}",
    ]
    return "\n".join([*lines, *map(_library, ("torch", "pyzmq", "tokenizers", "uvicorn"))])


def build() -> str:
    """The commit of a wheel, or that of the clone that this runs from; "unknown" where there is neither."""
    if COMMIT_FILE.is_file():
        return COMMIT_FILE.read_text(encoding="utf-8").strip() or "unknown"
    clone = Path(__file__).resolve().parents[1]
    if not (clone / ".git").exists():
        return "unknown"
    asked = ["git", "-C", str(clone), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _library(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is not installed" + (
            "; workers need it: pip install 'splitserve[worker]'" if name == "torch" else ""
        )
