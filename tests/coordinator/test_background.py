"""No background task dies in silence: its failure ends the process, in order and with its traceback."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from e2e.cluster import free_port

from splitserve.cli.settings import DEMO_MODEL
from splitserve.coordinator import main
from splitserve.coordinator.batch.runner import BatchRunner
from splitserve.coordinator.metrics.sampler import Sampler
from splitserve.coordinator.processes import Place
from splitserve.coordinator.server import HttpServer
from splitserve.coordinator.settings import CoordinatorSettings
from splitserve.coordinator.tenants.directory import KeyDirectory
from splitserve.coordinator.tenants.store import TenantStore
from splitserve.transport.channels.keys import generate_key

TASKS = {
    "probes": (main, "prove"),
    "cluster key": (main, "follow"),
    "keys of tenants": (KeyDirectory, "follow"),
    "samples": (Sampler, "follow"),
    "slow senders": (HttpServer, "_hurry"),
    "batches": (BatchRunner, "_run"),
}


@pytest.mark.parametrize("name", TASKS)
async def test_a_background_task_that_fails_ends_the_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def mistaken(*_: object, **__: object) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(*TASKS[name], mistaken)
    generate_key(tmp_path / "key")
    TenantStore(tmp_path / "tenants.db", create=True).close()
    settings = CoordinatorSettings(
        model=DEMO_MODEL,
        port=0,
        control_address=f"tcp://127.0.0.1:{free_port()}",
        key_file=tmp_path / "key",
        tenants_file=tmp_path / "tenants.db",
        batch_file=tmp_path / "batches.db",
    )
    with pytest.raises(SystemExit) as ended:
        async with asyncio.timeout(60):
            await main.serve(settings, Place())
    assert ended.value.code == 1
    (critical,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert critical.exc_info is not None
    assert "a mistake of ours" in caplog.text
