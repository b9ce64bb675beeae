"""Starts of roles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve.cli import start
from splitserve.worker.settings import DecodeSettings


@pytest.fixture
def process_as_before() -> Iterator[None]:
    handler, hook = signal.getsignal(signal.SIGTERM), threading.excepthook
    yield
    signal.signal(signal.SIGTERM, handler)
    threading.excepthook = hook


@pytest.mark.usefixtures("process_as_before")
def test_a_worker_ends_at_sigterm_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as the first process of a container, for which the kernel has no default action."""

    def fetch(settings: DecodeSettings, *, weights: bool) -> DecodeSettings:
        os.kill(os.getpid(), signal.SIGTERM)
        return settings

    monkeypatch.setattr(start, "with_folder", fetch)
    with pytest.raises(SystemExit) as ended:
        start.worker(DecodeSettings(model=Path("/models/m"), insecure=True))
    assert ended.value.code == 128 + signal.SIGTERM


def test_ctrl_c_while_a_command_is_imported_prints_nothing() -> None:
    code = """
import os, signal, sys
from splitserve.cli import __main__ as command
class Interrupting:
    def find_spec(self, name, *_):
        if name == "splitserve.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
command.main()
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")
