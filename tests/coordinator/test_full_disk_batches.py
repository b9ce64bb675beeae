"""A disk that is full: files, batches, and a whole coordinator."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest
from e2e.cluster import free_port
from support.full_disk import CHAT, eventually
from support.http_fakes import FakeDispatcher
from support.small_disk import SmallDisk

from splitserve.cli.settings import DEMO_MODEL
from splitserve.coordinator.batch.runner import BatchOptions
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.tenants.store import TenantStore
from splitserve.coordinator.text.served_model import ServedModel

# --- files and batches -----------------------------------------------------------------------------


@pytest.fixture
async def batch_server(
    dispatcher: FakeDispatcher, model: ServedModel, disk: SmallDisk
) -> AsyncIterator[HttpServer]:
    app = HttpApp(
        dispatcher,
        model,
        AppParts(HttpLimits(), dispatcher.system, batches=BatchOptions(disk.path / "batches.db")),
    )
    server = HttpServer(app)
    await server.start()
    yield server
    await server.stop(grace_s=0)


@pytest.fixture
async def batching(batch_server: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{batch_server.port}", verify=False, timeout=60
    ) as client:
        yield client


def upload(num_lines: int) -> dict[str, object]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 5}
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": CHAT, "body": body} for n in range(num_lines)]
    return {
        "files": {"file": ("in.jsonl", b"\n".join(json.dumps(line).encode() for line in lines))},
        "data": {"purpose": "batch"},
    }


async def test_files_are_refused_with_the_path_and_taken_once_there_is_space(
    batching: httpx.AsyncClient, disk: SmallDisk
) -> None:
    disk.fill()
    refused = await batching.post("/v1/files", **upload(500))  # type: ignore[arg-type]
    assert refused.status_code == 507
    message = (
        f"There is no space on the disk for the batch file {disk.path / 'batches.db'}: nothing was stored."
    )
    assert refused.json()["error"]["message"].startswith(message)
    assert (await batching.get("/v1/files")).json()["data"] == []
    disk.free()
    assert (await batching.post("/v1/files", **upload(500))).status_code == 200  # type: ignore[arg-type]


async def test_a_batch_waits_for_space_and_computes_nothing_twice(
    batching: httpx.AsyncClient, batch_server: HttpServer, disk: SmallDisk, dispatcher: FakeDispatcher
) -> None:
    file = (await batching.post("/v1/files", **upload(8))).json()  # type: ignore[arg-type]
    dispatcher.hold = True
    asked = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = (await batching.post("/v1/batches", json=asked)).json()
    await dispatcher.until(lambda: len(dispatcher.requests) == 8)
    disk.fill()
    dispatcher.hold = False
    await dispatcher.until(lambda: not dispatcher.running)
    await eventually(lambda: batch_server.app.metrics.failures.counts["running batches"] >= 8)
    disk.free()
    async with asyncio.timeout(60):
        while (now := (await batching.get(f"/v1/batches/{batch['id']}")).json())["status"] != "completed":
            await asyncio.sleep(0.05)
    assert now["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
    assert len(dispatcher.requests) == 8, "each was computed once"


# --- a whole coordinator ---------------------------------------------------------------------------


def test_a_coordinator_starts_on_a_full_disk(disk: SmallDisk) -> None:
    tenants = disk.path / "tenants.db"
    store = TenantStore(tenants, create=True)
    store.set_tenant("acme")
    key = store.create_key("acme").key
    store.close()
    disk.fill()
    argv = [
        "coordinator",
        "--model",
        str(DEMO_MODEL),
        "--insecure",
        "--port",
        "0",
        "--control-address",
        f"tcp://127.0.0.1:{free_port()}",
    ]
    argv += [
        "--tenants-file",
        str(tenants),
        "--batch-file",
        str(disk.path / "batches.db"),
        "--trace-folder",
        str(disk.path / "traces"),
    ]
    environ = {**os.environ, "TMPDIR": str(disk.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "splitserve.cli.main", *argv]
    sentence: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            sentence.append(line)
            if "HTTP on" in line:
                break
        else:
            pytest.fail("".join(sentence))
        url = next(word for word in sentence[-1].split() if word.startswith("http://")).rstrip(",")
        with httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, verify=False, timeout=60
        ) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/v1/models").status_code == 200
            assert client.post("/v1/files", **upload(3)).status_code == 507  # type: ignore[arg-type]
            big = client.post(
                "/v1/files", files={"file": ("big", b"x" * (3 << 20))}, data={"purpose": "batch"}
            )
            assert (big.status_code, "no space on the disk" in big.text) == (507, True)
        process.send_signal(signal.SIGTERM)
        sentence += process.stderr.readlines()
        assert process.wait(60) == 0
    text = "".join(sentence)
    assert Counter("there is no space" in line for line in sentence)[True] >= 4, text
    for what in ("tenants.db-limits", "tenants.db", "batches.db", "traces/requests-", "usage"):
        assert any("there is no space" in line and what in line for line in sentence), f"{what}: {text}"
    assert "Traceback" not in text
