"""The cluster of the bench mixed: coordinator and workers as one command starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from ...cli.settings import DEMO_MODEL_NAME
from ...cli.up import free_port
from ...coordinator.tenants.store import TenantStore

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "SPLITSERVE_COORDINATOR_DEAD_AFTER_S": "60",
}  # a busy machine is no dead worker


class Place(NamedTuple):
    """A cluster under test. ``metrics``: the address of each coordinator process's own; ``usage``: URL of the
    usage database."""

    url: str
    metrics: Sequence[str]
    keys: dict[str, str]
    model: str
    usage: str


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Place, list[psutil.Process], Path]]:
    """`splitserve up` with the demo model, three tenants, limits, metering and batches; its processes and its
    log."""
    store, keys = TenantStore(folder / "tenants", create=True), {}
    store.set_tier("small", None, {"requests_per_minute": 6})
    for tenant, tier in (("a", "premium"), ("b", "standard"), ("limited", "small")):
        store.set_tenant(tenant, tier=tier)
        keys[tenant] = store.create_key(tenant, limits={"tokens_per_minute": 1 << 40}).key
    store.close()
    port, log = free_port("127.0.0.1"), folder / "log"
    command = [
        sys.executable,
        "-m",
        "splitserve.cli",
        "up",
        "--port",
        str(port),
        "--log-level",
        "warning",
        "--kv-cache-gib",
        "0.25",
    ]
    command += ["--tenants-file", str(folder / "tenants"), "--batch-file", str(folder / "batches")]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}
        )
    try:
        deadline = time.monotonic() + 300
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the cluster did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        place = Place(url, [url], keys, DEMO_MODEL_NAME, f"sqlite:///{folder / 'tenants'}-usage")
        yield place, psutil.Process(process.pid).children(recursive=True), log
        process.terminate()
        if (status := process.wait(30)) != 0:
            raise RuntimeError(f"the cluster ended with {status}: {log.read_text()[-2000:]}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
