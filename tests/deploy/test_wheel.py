"""What a wheel has, and what it needs: the coordinator and the command line run without torch."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import httpx
import pytest
from e2e.cluster import free_port
from support.bare_venv import make_venv

from splitserve import __version__
from splitserve.transport.messages.fields import WIRE_VERSION
from splitserve.transport.process.private_files import write_private

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("LICENSE", "README.md", "pyproject.toml", "setup.py", "__init__.py", "py.typed", "src")
FOLDERS_OF_DATA = (
    "deploy/demo_model",
    "deploy/kubernetes",
    "deploy/monitoring",
    "deploy/systemd",
    "coordinator/dashboard/page",
    "engine/profiles",
)
FILES_OF_DATA = ("deploy/scale.sh", "deploy/slurm.sbatch", "planner/simulator/view.html", "py.typed")
BUILD = """
import sys
from setuptools import build_meta
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""
COMMIT = "1234567890ab"


def build(what: str, source: Path, out: Path) -> Path:
    """An sdist or a wheel of ``source``, without the native kernels: these build elsewhere, and take a
    minute."""
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{what}", str(out)],
        cwd=source,
        env={**os.environ, "CC": "false", "CXX": "false"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of a clone's files, with a commit as git would give it."""
    source = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "results")
    folders = [path.name for path in (ROOT / "src" / "splitserve").iterdir() if (ROOT / path.name).is_dir()]
    for name in (*COPIED, *folders):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    (source / "cli" / "commit.txt").write_text(COMMIT)
    return build("sdist", source, tmp_path_factory.mktemp("sdist") / "out")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist: so that has everything, too."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    [source] = folder.iterdir()
    return build("wheel", source, folder / "out")


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and what it needs without any extra: no torch."""
    return make_venv(tmp_path_factory.mktemp("bare"), wheel)


def run(programs: Path, *arguments: str, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    """``splitserve`` of that environment, outside of the repository."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(programs / "splitserve"), *arguments]
    return subprocess.run(
        command, cwd=programs, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_the_wheel_has_every_file_that_a_clone_has(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = [path for name in FOLDERS_OF_DATA for path in (ROOT / name).rglob("*") if path.is_file()]
    assert len(files) > 20
    missing = {
        f"splitserve/{path.relative_to(ROOT)}" for path in (*files, *(ROOT / name for name in FILES_OF_DATA))
    } - inside
    assert not missing
    folders = [path.name for path in (ROOT / "src" / "splitserve").iterdir() if (ROOT / path.name).is_dir()]
    modules = {
        f"splitserve/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")
    }
    assert modules == {path for path in inside if path.endswith(".py") and path != "splitserve/__init__.py"}


def test_the_sdist_has_every_source_of_the_kernels(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        inside = {Path(name).name for name in archive.getnames() if "/kernels/cpu/" in name}
    assert {
        path.name for path in (ROOT / "kernels" / "cpu").iterdir() if path.suffix in (".h", ".cpp")
    } <= inside


def test_one_wheel_is_for_every_python(wheel: Path) -> None:
    assert re.match(r"splitserve-[^-]+-cp311-abi3-", wheel.name)


def test_what_serves_needs_few_packages(wheel: Path) -> None:
    [metadata] = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA")]
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    hard = [line for line in re.findall(r"^Requires-Dist: (.*)$", text, re.M) if "extra ==" not in line]
    assert not [
        line
        for line in hard
        if line.startswith(("torch", "safetensors", "matplotlib", "aiohttp", "prompt", "nvidia"))
    ]
    assert len(hard) <= 20


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version_tells_one_installation_from_another(bare: Path, argument: str) -> None:
    printed = run(bare, argument)
    assert printed.returncode == 0, printed.stderr
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    for line in (
        f"splitserve {__version__}",
        f"wire {WIRE_VERSION}",
        f"build {COMMIT}",
        python,
        "torch is not installed",
    ):
        assert re.search(rf"^{re.escape(line)}", printed.stdout, re.M), printed.stdout
    assert re.search(r"^files in /.*/site-packages/splitserve$", printed.stdout, re.M), printed.stdout


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["up"], "worker"),
        (["prefill", "--model", "MODEL", "--insecure"], "worker"),
        (["profile", "--model", "MODEL", "--output", "profile.json"], "worker"),
        (["bench", "--requests", "1"], "bench"),
        (["bench", "--plot-file", "bench.png"], "plan"),
    ],
)
def test_what_needs_more_says_what_to_install(bare: Path, command: list[str], extra: str) -> None:
    done = run(bare, *(str(ROOT / "deploy" / "demo_model") if word == "MODEL" else word for word in command))
    assert done.returncode in (1, 2)
    assert f"pip install 'splitserve[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_coordinator_runs_without_torch(bare: Path, tmp_path: Path) -> None:
    port, control = free_port(), free_port()
    key = tmp_path / "admin.key"
    write_private(key, "an-admin-key-of-this-test")
    options = ["--model", str(ROOT / "deploy" / "demo_model"), "--insecure", "--admin-key-file", str(key)]
    command = [str(bare / "splitserve"), "coordinator", *options]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--control-address", f"tcp://127.0.0.1:{control}"],
            cwd=tmp_path,
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=30) as http:
            deadline = time.monotonic() + 60
            while True:
                try:
                    assert http.get("/health").status_code == 200
                    break
                except httpx.TransportError:
                    assert process.poll() is None, (tmp_path / "log").read_text()
                    assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                    time.sleep(0.05)
            assert http.get("/ready").status_code == 503, "it has no workers"
            tokens = http.post("/tokenize", json={"prompt": "What does os.path.join do?"}).json()["count"]
            assert tokens > 3
            operator = {"authorization": f"Bearer {key.read_text()}"}
            assert "splitserve_workers" in http.get("/metrics", headers=operator).text
            assert http.get("/").status_code == 200, "the dashboard is in the wheel"
            reported = run(bare, "top", "--url", f"http://127.0.0.1:{port}", "--admin-key-file", str(key))
            assert "No workers are connected" in reported.stdout, reported.stderr
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_planning_runs_without_torch(bare: Path, tmp_path: Path) -> None:
    trace = str(tmp_path / "trace.jsonl")
    made = run(bare, "trace", "make", "--rate", "2", "--duration-s", "20", "--output", trace)
    assert made.returncode == 0, made.stderr
    assert run(bare, "trace", "stats", trace).returncode == 0
    simulated = run(
        bare, "simulate", "--trace", trace, "--profile", "llama-125m-cpu", "--prefill", "1", "--decode", "1"
    )
    assert simulated.returncode == 0, simulated.stderr


def test_keys_and_the_doctor_run_without_torch(bare: Path, tmp_path: Path) -> None:
    assert run(bare, "keygen", str(tmp_path / "cluster.key")).returncode == 0
    tenants = ("--tenants-file", str(tmp_path / "tenants.json"))
    assert run(bare, "keys", "create", *tenants, "--tenant", "acme").returncode == 0
    assert "acme" in run(bare, "keys", "list", *tenants).stdout
    seen = run(bare, "doctor", "--port", "0", "--control-address", "tcp://127.0.0.1:0")
    assert "this host can run a coordinator, but no worker" in seen.stdout, seen.stdout + seen.stderr
    assert "Traceback" not in seen.stderr


def test_up_without_arguments_serves_the_demo(wheel: Path, tmp_path: Path) -> None:
    programs = make_venv(tmp_path / "whole", wheel, ["worker"])
    done = run(programs, "up", "--port", "0", "--prompt", "What does os.path.join do?", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "join" in done.stdout
    assert "Traceback" not in done.stderr, "its temporary folder is removed once"
