"""Starts of roles."""

from __future__ import annotations

import os
import signal
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
