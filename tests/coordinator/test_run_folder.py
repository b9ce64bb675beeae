"""Commands find a coordinator of this host; what a killed process leaves behind goes with the next start."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from splitserve.bench.operator_auth import operator_headers
from splitserve.coordinator.run_folder import Door, RunFolder, announce, find_door

KILLED = """
import os, signal
from splitserve.coordinator.run_folder import RunFolder
folder = RunFolder()
(folder.path / "cluster.key").write_text("secret")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of all runs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    RunFolder().close()
    (root,) = tmp_path.iterdir()
    return root


def door(folder: RunFolder, admin_port: int = 8001) -> Door:
    (folder.path / "admin.key").write_text("k" * 32 + "\n")
    url, admin_url = "http://127.0.0.1:8000", f"http://127.0.0.1:{admin_port}"
    return Door(
        url=url, admin_url=admin_url, control_address="tcp://x:1", admin_key_file=folder.path / "admin.key"
    )


def test_what_a_killed_process_left_goes_with_the_next_start(root: Path, tmp_path: Path) -> None:
    lives = RunFolder()
    subprocess.run([sys.executable, "-c", KILLED], env={"TMPDIR": str(tmp_path)}, timeout=60, check=False)
    (left,) = set(root.iterdir()) - {lives.path}
    assert (left / "cluster.key").exists()
    next_one = RunFolder()
    assert set(root.iterdir()) == {lives.path, next_one.path}
    for folder in (lives, next_one):
        folder.close()
    assert not any(root.iterdir())


def test_a_coordinator_is_found_by_its_address() -> None:
    folder = RunFolder()
    announce(folder.path, 0, door(folder))
    for url in (
        "http://127.0.0.1:8000",
        "http://localhost:8000/",
        "http://127.0.0.1:8001",
        "http://[::1]:8001",
    ):
        found = find_door(url)
        assert found is not None, url
        assert (found.admin_url, found.headers()) == (
            "http://127.0.0.1:8001",
            {"authorization": "Bearer " + "k" * 32},
        )
    for url in ("http://127.0.0.1:8002", "http://example.com:8000"):
        assert operator_headers(url) == {}, url
    folder.close()


def test_only_while_it_lives(root: Path) -> None:
    folder = RunFolder()
    announce(folder.path, 0, door(folder))
    os.close(folder._lock)  # as if it had been killed
    assert find_door("http://127.0.0.1:8000") is None


def test_all_of_it_is_private(root: Path) -> None:
    folder = RunFolder()
    announce(folder.path, 0, door(folder))
    assert [
        path.stat().st_mode & 0o077
        for path in (root, folder.path, folder.path / "lock", folder.path / "coordinator-0.json")
    ] == [0] * 4
    root.chmod(0o755)
    with pytest.raises(PermissionError, match="must be a folder of yours with mode 0700"):
        RunFolder()
    assert find_door("http://127.0.0.1:8000") is None
    root.chmod(0o700)
    folder.close()
