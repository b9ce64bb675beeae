"""The start and the end of a worker whose folder of adapters is missing, or hangs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from splitserve.engine.errors import AdapterError
from splitserve.worker import adapters
from splitserve.worker.adapters import AdapterFolder
from splitserve.worker.main import run
from splitserve.worker.settings import DecodeSettings


def test_a_start_without_the_folder_ends_before_the_model_is_loaded(tmp_path: Path) -> None:
    settings = DecodeSettings(model=tmp_path / "none", insecure=True, lora_folder=tmp_path / "adapters")
    with pytest.raises(AdapterError, match="there is no such folder"):
        run(settings)


@pytest.mark.timeout(60)
def test_a_folder_that_hangs_keeps_no_worker_from_its_start_or_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(adapters, "FIRST_LOOK_S", 0.05)
    monkeypatch.setattr(adapters, "STOP_S", 0.05)

    def scandir(path: Path) -> None:
        hangs.wait(30)
        raise OSError(5, "it has hung")

    monkeypatch.setattr(os, "scandir", scandir)
    watched = AdapterFolder(tmp_path, SimpleNamespace(num_slots=1), period_s=0.01)
    assert watched.slots.reported == ()
    watched.stop()
    assert watched._thread.is_alive()
    assert watched._thread.daemon
    hangs.set()
    watched._thread.join(20)
