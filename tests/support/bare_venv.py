"""A virtual environment that has only what a wheel declares, made in a second and without a network: packages
are links into this one's."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement


def make_venv(folder: Path, wheel: Path, extras: Iterable[str] = ()) -> Path:
    """Installs ``wheel`` and links the distributions that it needs, with these extras. Returns the folder of
    its programs."""
    venv.create(folder, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    python = folder / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-qq",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(install, check=True, timeout=100)
    [metadata] = importlib.metadata.distributions(name="splitserve", path=[str(site)])
    for name in closure(metadata.requires or [], extras):
        link(name, site)
    return folder / "bin"


def closure(requirements: Iterable[str], extras: Iterable[str]) -> set[str]:
    """The names of all distributions that these requirements bring."""
    found: set[str] = set()
    waiting = [(requirement, extra) for requirement in requirements for extra in ("", *extras)]
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name in found:
            continue
        found.add(requirement.name)
        needed = importlib.metadata.requires(requirement.name) or []
        waiting += [(each, other) for each in needed for other in ("", *requirement.extras)]
    return found


def link(name: str, site: Path) -> None:
    """Makes a distribution of this environment importable from ``site``."""
    ours = Path(sysconfig.get_paths()["purelib"])
    for top in {file.parts[0] for file in importlib.metadata.files(name) or []} - {"..", "__pycache__"}:
        if not (site / top).exists():
            (site / top).symlink_to(ours / top)
