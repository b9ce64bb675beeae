"""The archive of gpu_check is made by one command and runs without a network."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from splitserve.bench.gpu_check.plan import SPARE, STAGES

ROOT = Path(__file__).parents[2]


def python_without_index(folder: Path) -> Path:
    """A Python whose pip downloads nothing, but notes what it was to download."""
    script = folder / "python"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$3" = download ]; then\n'
        '    while [ "$1" != -d ]; do shift; done\n'
        f'    mkdir -p "$2"; cp "$4" {folder}/asked; touch "$2"/numpy-9-py3-none-any.whl\n'
        "else\n"
        f'    exec {sys.executable} "$@"\n'
        "fi\n"
    )
    script.chmod(0o755)
    return script


def test_the_bundle_runs_where_nothing_is_missing(tmp_path: Path) -> None:
    archive, environ = tmp_path / "gpu_check.tar", {**os.environ, "PIP_NO_INDEX": "1", "WITHOUT": "numpy"}
    python = python_without_index(tmp_path)
    subprocess.run(
        [ROOT / "deploy/gpu_check_bundle.sh", archive], env={**environ, "PYTHON": str(python)}, check=True
    )
    asked = (tmp_path / "asked").read_text().splitlines()
    names = {line.partition(">")[0] for line in asked}
    assert {"pyzmq", "msgspec", "cryptography", "aiohttp", "xxhash"} <= names
    assert "torch" not in names
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    assert not (tmp_path / "gpu_check/tree/tests").exists()
    for built in (ROOT / "kernels").glob("_cpu.*.so"):
        assert (tmp_path / "gpu_check/tree/kernels" / built.name).read_bytes() == built.read_bytes()
    assert (tmp_path / "gpu_check/wheels").is_dir()
    assert not list((tmp_path / "gpu_check/wheels").glob("numpy*")), "left out"
    command = [tmp_path / "gpu_check/run.sh", tmp_path / "out", "--rehearse", "--only", "fa3"]
    subprocess.run(command, env={**environ, "PYTHON": sys.executable}, check=True, timeout=250)
    text = (tmp_path / "out/summary.txt").read_text()
    commit = (tmp_path / "gpu_check/tree/cli/commit.txt").read_text().strip()
    assert f"commit {commit}" in text
    assert "LEFT OUT (1)\n  FlashAttention-3: " in text


def test_help_says_what_to_bring() -> None:
    done = subprocess.run(
        [ROOT / "deploy/gpu_check_bundle.sh", "--help"], capture_output=True, text=True, check=True
    )
    assert "gpu_check/run.sh OUT" in done.stdout
    assert "brings Python 3.12" in done.stdout


def needed(requirements: Iterable[str]) -> set[str]:
    """Names of these packages and of all that they need."""
    found: set[str] = set()
    waiting = list(map(Requirement, requirements))
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):
                waiting += map(Requirement, metadata.requires(name) or [])
    return found


def test_its_parts_need_no_package_that_the_bundle_does_not_bring() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    brought = needed([*project["dependencies"], *extras["worker"], *extras["bench"], *extras["gpu"]])
    others = {
        name
        for name, owners in metadata.packages_distributions().items()
        if name != "splitserve" and not brought & set(map(canonicalize_name, owners))
    }
    modules = {part.run.partition(":")[0] for stage in (*STAGES, *SPARE) for part in stage}
    modules |= {"splitserve.bench.kernels.compile_kernels", "splitserve.bench.kernels.gpu_worker"}
    assert "safetensors" in others
    code = f"""
import importlib, sys
class Absent:
    def find_spec(self, name, *_):
        if name.partition('.')[0] in {others}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
for name in {modules}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
