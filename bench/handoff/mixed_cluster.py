"""The cluster of the bench mixed: coordinator and workers as one command starts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from ...cli.settings import DEMO_MODEL_NAME
from ...cli.up import free_port
from ...coordinator.tenants.store import TenantStore
from ..live_cluster import PROGRAM, started, stop, words

ENVIRONMENT = {"SPLITSERVE_COORDINATOR_DEAD_AFTER_S": "60"}  # a busy machine is no dead worker


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
    files = {"tenants_file": folder / "tenants", "batch_file": folder / "batches"}
    options = words(port=port, log_level="warning", kv_cache_gib=0.25, **files)
    url = f"http://127.0.0.1:{port}"
    with started([*PROGRAM, "up", *options], f"{url}/ready", log, **ENVIRONMENT) as process:
        place = Place(url, [url], keys, DEMO_MODEL_NAME, f"sqlite:///{folder / 'tenants'}-usage")
        yield place, psutil.Process(process.pid).children(recursive=True), log
        stop(process, log)
