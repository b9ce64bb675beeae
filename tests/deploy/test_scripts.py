"""The shell scripts are valid, explain themselves, and name the remedy when something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from splitserve.cli.reference import PAGE, page

ROOT = Path(__file__).resolve().parents[2]
SOURCED = ("setup.sh", "test_packages.sh")
SCRIPTS = [*sorted((ROOT / "deploy").glob("*.sh")), ROOT / ".ci" / "run"]


def bash(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **env}
    return subprocess.run(
        ["bash", *arguments], env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_valid_bash(script: Path) -> None:
    assert bash("-n", str(script)).returncode == 0


@pytest.mark.parametrize(
    "script", [script for script in SCRIPTS if script.name not in SOURCED], ids=lambda script: script.name
)
def test_scripts_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)


def test_quickstart_explains_itself() -> None:
    result = bash(str(ROOT / "deploy" / "quickstart.sh"), "--help")
    assert result.returncode == 0
    assert "--prompt" in result.stdout
    assert "set -euo" not in result.stdout


@pytest.mark.parametrize("other", [["--chat"], ["--prompt", "Hi"], ["--prompt=Hi"]])
def test_quickstart_refuses_to_serve_and_to_end_with_an_answer(bare_clone: Path, other: list[str]) -> None:
    for given in (["--serve", *other], [*other, "--serve"]):
        result = bash(str(bare_clone / "deploy" / "quickstart.sh"), *given, PYTHON="/nowhere/python3")
        assert result.returncode == 1
        assert "give one of them" in result.stderr


@pytest.fixture
def bare_clone(tmp_path: Path) -> Path:
    """The scripts alone, with no virtual environment yet."""
    (tmp_path / "deploy").mkdir()
    for name in ("quickstart.sh", "setup.sh", "test_packages.sh", "constraints.txt"):
        shutil.copy(ROOT / "deploy" / name, tmp_path / "deploy")
    return tmp_path


def test_no_python_is_said_with_what_to_do(bare_clone: Path) -> None:
    result = bash(str(bare_clone / "deploy" / "quickstart.sh"), PYTHON="/nowhere/python3")
    assert result.returncode == 1
    assert "Python 3.11 or newer is needed" in result.stderr
    assert "apt-get install python3" in result.stderr


def test_no_venv_module_is_said_with_what_to_do(bare_clone: Path) -> None:
    python = bare_clone / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *venv*) exit 1 ;; --version) echo Python 3.11 ;; esac\n')
    python.chmod(0o755)
    result = bash(str(bare_clone / "deploy" / "quickstart.sh"), PYTHON=str(python))
    assert result.returncode == 1
    assert "apt-get install python3-venv" in result.stderr


def test_what_pip_said_is_printed_where_it_fails_beside_another(bare_clone: Path) -> None:
    python = bare_clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\necho ' Downloading it'; echo no space left; echo ERROR: failed >&2; exit 1\n"
    )
    python.chmod(0o755)
    script = "set -euo pipefail; source deploy/setup.sh; pip_install torch & wait $! || exit 1"
    result = bash("-c", f"cd {bare_clone}; {script}")
    assert result.returncode == 1
    assert "no space left\nERROR: failed\nerror: pip could not install torch" in result.stderr


def test_setuptools_is_not_replaced_beside_the_build_that_imports_it(bare_clone: Path) -> None:
    python = bare_clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *"pip install"*) echo "$*" >>asked ;; esac\n')
    python.chmod(0o755)
    result = bash("-c", f"cd {bare_clone}; set -euo pipefail; source deploy/setup.sh; install_package serve")
    assert result.returncode == 0, result.stderr
    first, *others = (bare_clone / "asked").read_text().splitlines()
    assert first.endswith(" setuptools")
    assert any("--editable" in other for other in others)


def test_the_newest_python_alone_will_do(tmp_path: Path) -> None:
    (tmp_path / "python3.14").write_text("#!/bin/sh\n")
    (tmp_path / "python3.14").chmod(0o755)
    found = bash("-c", f"source {ROOT}/deploy/setup.sh; PATH={tmp_path}; find_python")
    assert found.stdout.strip() == str(tmp_path / "python3.14"), found.stderr


@pytest.mark.parametrize(
    "apt_get", ["echo E: no network >&2; exit 100", "exec sleep 30"], ids=["fails", "hangs"]
)
def test_debian_packages_that_cannot_be_installed_fail_nothing(tmp_path: Path, apt_get: str) -> None:
    for tool in (
        "bash",
        "cat",
        "chmod",
        "dirname",
        "mktemp",
        "rm",
        "sh",
        "sleep",
        "tail",
        "timeout",
        "touch",
    ):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\n{apt_get}\n")
    (tmp_path / "apt-get").chmod(0o755)
    script = (
        f"source {ROOT}/deploy/setup.sh; VENV={tmp_path} SERVICE_POLICY={tmp_path}/policy; "
        "install_test_packages; install_test_packages"
    )
    result = bash("-c", script, PATH=str(tmp_path), TEST_PACKAGES_SECONDS="1")
    assert result.returncode == 0, result.stderr
    assert "Debian package redis-server" in result.stderr
    assert "tests of the dashboard in a browser are skipped" in result.stderr
    assert result.stderr.count("installing Debian packages") == (
        os.geteuid() == 0
    )  # tried once, not at every run
    assert not (tmp_path / "policy").exists()


def test_the_example_for_scaling_starts_a_worker_and_tidies_up(tmp_path: Path) -> None:
    (tmp_path / "splitserve").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "splitserve").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"

    def scale(*arguments: str) -> subprocess.CompletedProcess[str]:
        return bash(
            str(ROOT / "deploy" / "scale.sh"), *arguments, PATH=path, SCALE_FOLDER=str(tmp_path / "logs")
        )

    started = scale("--model", "a b", "up", "decode")
    assert started.returncode == 0, started.stderr
    name = started.stdout.split()[0]
    log = tmp_path / "logs" / f"{name}.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert log.read_text() == f"worker --model a b --start-as decode --name {name}\n"
    assert scale("--model", "a b", "down", name).returncode == 0
    assert not log.exists()
    assert scale("sideways", "decode").returncode == 2
    assert scale("up").returncode == 2


def test_the_configuration_page_is_current() -> None:
    assert PAGE.read_text() == page(), "write it again: python -m splitserve.cli.reference"
