"""Two coordinator processes, two tenants, real workers: one port, one cache each, limits that hold across,
records that add up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2e.cluster import HTTP, MODEL_NAME, NEVER_DEAD, Cluster, answers, free_port, running, wait_for
from transformers import PreTrainedModel

from splitserve.bench.handoff.mixed import Place, mix
from splitserve.coordinator.tenants.store import TenantStore
from splitserve.coordinator.tenants.usage_database import open_database

PROCESSES = 2


class Front:
    """The cluster, its keys, and each process's own admin port."""

    def __init__(self, cluster: Cluster, keys: dict[str, str], admin: int, folder: Path) -> None:
        self.cluster, self.keys, self.folder = cluster, keys, folder
        self.admin = [f"http://127.0.0.1:{admin + n}" for n in range(PROCESSES)]

    def ask(self, tenant: str, prompt: list[int], url: str = "") -> httpx.Response:
        """Over a connection of its own: the kernel deals it to some process."""
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return HTTP.post(f"{url or self.cluster.url}/v1/completions", headers=headers, json=body)

    def workers_seen(self) -> list[int]:
        """By each process."""
        return [len(HTTP.get(f"{url}/debug/state").json()["workers"]) for url in self.admin]

    def pid(self, number: int) -> int:
        pid: int = HTTP.get(f"{self.admin[number]}/debug/state").json()["coordinator"]["pid"]
        return pid


@pytest.fixture(scope="module")
def front(tiny: tuple[Path, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("tenants")
    store = TenantStore(folder / "tenants", create=True)
    store.set_tier("small", None, {"requests_per_minute": 2})
    keys = {}
    for tenant, tier in (("a", "standard"), ("b", "standard"), ("limited", "small")):
        store.set_tenant(tenant, tier=tier)
        keys[tenant] = store.create_key(tenant).key
    store.close()
    admin = free_port(PROCESSES)
    arguments = [
        "--processes",
        str(PROCESSES),
        "--tenants-file",
        str(folder / "tenants"),
        "--admin-port",
        str(admin),
    ]
    arguments += ["--batch-file", str(folder / "batches")]
    with running(tiny[0], folder, *arguments, "--kv-cache-gib", "0.05", *NEVER_DEAD) as cluster:
        front = Front(cluster, keys, admin, folder)
        wait_for("every process knows both workers", lambda: _seen(front) == [2] * PROCESSES)
        wait_for("every process is ready", lambda: all(answers(f"{url}/ready") for url in front.admin))
        yield front


def test_a_prefix_is_its_tenants_on_every_process_and_no_other_tenants_on_any(front: Front) -> None:
    prompt = list(range(10, 10 + 200))

    def cached(tenant: str) -> int:
        answer = front.ask(tenant, prompt)
        assert answer.status_code == 200
        tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert cached("a") == 0
    assert [cached("a") for _ in range(9)] == [192] * 9  # nine connections: surely more than one process
    assert [cached("b"), cached("b")] == [0, 192]


def test_limits_hold_across_processes(front: Front) -> None:
    began = time.monotonic()
    answers = [front.ask("limited", [1, 2, 3]) for _ in range(9)]
    regained = (time.monotonic() - began) // 30
    assert 2 <= [answer.status_code for answer in answers].count(200) <= 2 + regained
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) <= 30
    assert HTTP.get(f"{front.cluster.url}/v1/models").status_code == 401


async def test_what_clients_of_all_kinds_saw_is_what_is_metered_and_counted(front: Front) -> None:
    """(10,000 of them: ``python -m splitserve.bench.handoff.mixed``.)"""
    place = Place(
        front.cluster.url, front.admin, front.keys, MODEL_NAME, f"sqlite:///{front.folder}/tenants-usage"
    )
    result = await mix(place, 150, seed=2)
    assert result["failures"] == []
    assert result["compared_one_by_one"] > 100


def test_a_process_that_is_killed_takes_only_its_own_connections_along(front: Front) -> None:
    victim = front.pid(1)
    os.kill(victim, signal.SIGKILL)
    answered = 0
    deadline = time.monotonic() + 60
    while answered < 10:
        try:
            answered += front.ask("a", [5, 6, 7]).status_code == 200
        except httpx.TransportError:  # it was dealt to the one that is gone
            assert time.monotonic() < deadline
    wait_for("it is started again and knows its workers", lambda: _seen(front) == [2] * PROCESSES)
    assert front.pid(1) != victim


def _seen(front: Front) -> list[int]:
    try:
        return front.workers_seen()
    except httpx.TransportError:
        return []


def test_every_request_has_one_record(front: Front) -> None:
    before = _records(front)
    for _ in range(5):
        front.ask("b", [9, 8, 7])
    wait_for("five more records", lambda: _records(front) >= before + 5)


def _records(front: Front) -> int:
    rows = open_database(f"sqlite:///{front.folder}/tenants-usage").totals(["tenant"], 0, 1e12)
    return next((row["requests"] for row in rows if row["tenant"] == "b"), 0)
