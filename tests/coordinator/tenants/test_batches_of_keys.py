"""Batches follow the present state of their key: revoked or expired it ends them, and changed limits hold for
the rest."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import httpx
import pytest
from support.http_fakes import FakeDispatcher

from splitserve.cli.key_settings import KeysRotateSettings
from splitserve.coordinator.batch.routes import WINDOW_S
from splitserve.coordinator.batch.runner import BatchOptions
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.tenants.opening import KeyDirectory
from splitserve.coordinator.tenants.shared_limiter import SharedLimiter
from splitserve.coordinator.tenants.store import NewKey, TenantStore
from splitserve.coordinator.tenants.tenancy import Tenancy
from splitserve.coordinator.text.served_model import ServedModel

NUM_LINES = 40
LINES = [
    {
        "custom_id": f"r{i}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": f"quick {i}", "max_tokens": 4},
    }
    for i in range(NUM_LINES)
]


@pytest.fixture
def store(tmp_path: Path) -> TenantStore:
    store = TenantStore(tmp_path / "tenants", create=True)
    store.set_tenant("acme", tier="premium")
    return store


@pytest.fixture
def key(store: TenantStore) -> NewKey:
    return store.create_key("acme")


@pytest.fixture
def directory(store: TenantStore, key: NewKey, tmp_path: Path) -> KeyDirectory:
    return KeyDirectory(tmp_path / "tenants")


@pytest.fixture
def max_running() -> int:
    return 4


@pytest.fixture
async def server(
    store: TenantStore,
    directory: KeyDirectory,
    dispatcher: FakeDispatcher,
    model: ServedModel,
    tmp_path: Path,
    max_running: int,
) -> AsyncIterator[HttpServer]:
    limiter = SharedLimiter(tmp_path / "limits")
    batches = BatchOptions(tmp_path / "batches", max_running=max_running)
    server = HttpServer(
        HttpApp(dispatcher, model, AppParts(tenancy=Tenancy(directory, limiter), batches=batches))
    )
    following = asyncio.create_task(directory.follow(0.05))
    await server.start()
    yield server
    following.cancel()
    await server.stop(grace_s=0)
    await limiter.stop()
    directory.close()
    store.close()


@pytest.fixture
async def http(server: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def submit(http: httpx.AsyncClient, key: NewKey) -> str:
    content = "\n".join(map(json.dumps, LINES))
    file = (
        await http.post(
            "/v1/files", files={"file": content}, data={"purpose": "batch"}, headers=bearer(key.key)
        )
    ).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str((await http.post("/v1/batches", json=asked, headers=bearer(key.key))).json()["id"])


async def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "end",
    [
        TenantStore.revoke_key,
        partial(TenantStore.revoke_key, grace_s=1.0),
        partial(TenantStore.rotate_key, grace_s=0.0),
    ],
)
async def test_a_key_that_opens_no_more_ends_its_batches(
    http: httpx.AsyncClient,
    store: TenantStore,
    directory: KeyDirectory,
    dispatcher: FakeDispatcher,
    key: NewKey,
    end: Callable[[TenantStore, str], object],
) -> None:
    """Revoked at once, expired later, or replaced at once: the new key takes no batch over, for the old one
    may have leaked."""
    dispatcher.hold = True
    batch = await submit(http, key)
    await dispatcher.until(lambda: len(dispatcher.running) == 4)
    end(store, key.id)
    await until(lambda: not dispatcher.running)
    other = store.create_key("acme")
    await until(lambda: directory.account_of_key(int(other.id.removeprefix("key_"))) is not None)
    http.headers.update(bearer(other.key))
    async with asyncio.timeout(60):
        while (found := (await http.get(f"/v1/batches/{batch}")).json())["status"] == "in_progress":
            await asyncio.sleep(0.02)
    assert (found["status"], found["errors"]["data"][0]["code"]) == ("failed", "invalid_api_key")
    assert found["request_counts"] == {"total": NUM_LINES, "completed": 0, "failed": NUM_LINES}
    errors = (await http.get(f"/v1/files/{found['error_file_id']}/content")).text.splitlines()
    assert [json.loads(line)["error"]["code"] for line in errors] == ["invalid_api_key"] * NUM_LINES


async def test_a_batch_outlives_the_rotation_of_its_key(
    http: httpx.AsyncClient,
    store: TenantStore,
    directory: KeyDirectory,
    dispatcher: FakeDispatcher,
    key: NewKey,
) -> None:
    """The old key opens for as long as a batch may take, unless ``--grace-s`` is given."""
    grace_s = KeysRotateSettings.model_fields["grace_s"].default
    assert grace_s >= WINDOW_S
    dispatcher.hold = True
    batch = await submit(http, key)
    await dispatcher.until(lambda: len(dispatcher.running) == 4)
    fresh = store.rotate_key(key.id, grace_s)
    await until(lambda: directory.account_of_key(int(fresh.id.removeprefix("key_"))) is not None)
    dispatcher.hold = False
    http.headers.update(bearer(fresh.key))
    async with asyncio.timeout(60):
        while (found := (await http.get(f"/v1/batches/{batch}")).json())["status"] in (
            "in_progress",
            "finalizing",
        ):
            await asyncio.sleep(0.02)
    assert (found["status"], found["request_counts"]["completed"]) == ("completed", NUM_LINES)


async def test_limits_that_change_hold_for_what_is_left(
    http: httpx.AsyncClient,
    server: HttpServer,
    store: TenantStore,
    directory: KeyDirectory,
    dispatcher: FakeDispatcher,
    key: NewKey,
) -> None:
    dispatcher.hold = True
    await submit(http, key)
    await dispatcher.until(lambda: len(dispatcher.running) == 4)
    store.set_tier("premium", None, {"requests_per_minute": 1})
    number = int(key.id.removeprefix("key_"))
    await until(
        lambda: (
            (account := directory.account_of_key(number)) is not None
            and account.tenant_limits.requests_per_minute == 1
        )
    )
    dispatcher.hold = False
    await until(lambda: server.app.metrics.counts.refusals["rate_limit_exceeded"] >= 1)
    assert len(dispatcher.requests) == 5, "four that ran, and one a minute"
    assert {request.priority_class for request in dispatcher.requests} == {"batch"}


@pytest.mark.parametrize("max_running", [16])
async def test_a_batch_that_waits_for_a_limit_holds_up_no_other(
    http: httpx.AsyncClient, server: HttpServer, store: TenantStore, directory: KeyDirectory, key: NewKey
) -> None:
    """It is asked for once in a while, not again and again while others wait to be looked at."""
    store.set_tier("premium", None, {"requests_per_minute": 1})
    store.set_tenant("other", tier="standard")
    other = store.create_key("other")
    await until(lambda: directory.account_of_key(int(other.id.removeprefix("key_"))) is not None)
    await submit(http, key)
    refusals = server.app.metrics.counts.refusals
    await until(lambda: refusals["rate_limit_exceeded"] >= 1)
    http.headers.update(bearer(other.key))
    batch = await submit(http, other)
    async with asyncio.timeout(60):
        while (await http.get(f"/v1/batches/{batch}")).json()["status"] != "completed":
            await asyncio.sleep(0.02)
    assert refusals["rate_limit_exceeded"] <= 32, "as many as may run at a time, once a second"
