"""One record a request, once, whatever is killed; and the sums are those of the metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.http_fakes import ADMIN_KEY, OPERATOR, FakeDispatcher

from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.tenants import usage_database
from splitserve.coordinator.tenants.meter import Meter
from splitserve.coordinator.tenants.opening import KeyDirectory
from splitserve.coordinator.tenants.store import TenantStore
from splitserve.coordinator.tenants.tenancy import Tenancy
from splitserve.coordinator.tenants.usage_database import UsageDatabase, open_database
from splitserve.coordinator.tenants.usage_journal import UsageJournal, journal_path, left_behind
from splitserve.coordinator.tenants.usage_record import UsageRecord
from splitserve.coordinator.text.served_model import ServedModel

NOW = 1.7e9


def record(id: str, tenant: str = "t", status: str = "200", tokens: int = 5) -> UsageRecord:
    return UsageRecord(
        id,
        NOW,
        tenant,
        "key_1",
        "m",
        "/v1/completions",
        "standard",
        status,
        10,
        4,
        tokens,
        12.5,
        decode_s=0.25,
    )


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def make(folder: Path, **more: float) -> Meter:
    meter = Meter(f"sqlite:///{folder}/usage", folder, "journal-", **more)
    meter.start()
    return meter


def statuses(folder: Path) -> dict[str, int]:
    return {
        row["status"]: row["requests"]
        for row in open_database(f"sqlite:///{folder}/usage").totals(["status"], 0, 1e12)
    }


def test_records_are_deleted_when_they_are_old_enough(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/usage")
    now = time.time()
    old = record("old")._replace(started=now - 10_000, status="499")
    database.insert([old, record("new")._replace(started=now)])
    meter = make(tmp_path, write_every_s=0.01, keep_s=5000)
    until(lambda: statuses(tmp_path) == {"200": 1})
    meter.stop()
    database.close()


@pytest.fixture(params=["sqlite", "postgres"])
def database(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[UsageDatabase]:
    """PostgreSQL's is not believed gone because the machine stood still."""
    monkeypatch.setattr(usage_database, "CONNECT_TIMEOUT_S", 60)
    if request.param == "sqlite":
        yield open_database(f"sqlite:///{tmp_path}/usage")
        return
    if shutil.which("initdb") is None:
        pytest.skip("there is no initdb; Debian's package is postgresql")
    folder = Path(
        tempfile.mkdtemp(prefix="splitserve-postgres-", dir="/tmp")
    )  # its user may not enter tmp_path
    as_user = {"user": "postgres"} if os.getuid() == 0 else {}
    shutil.chown(folder, **as_user) if as_user else None
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/tmp"}
    run = partial(subprocess.run, check=True, **quiet, **as_user)
    run(["initdb", "-D", f"{folder}/data", "-A", "trust", "-U", "u", "--no-sync"])
    options = f"-F -k {folder} -c listen_addresses="
    run(["pg_ctl", "-D", f"{folder}/data", "-w", "-o", options, "start"])
    database = open_database(f"postgresql://u@/postgres?host={folder}")
    yield database
    database.close()
    run(["pg_ctl", "-D", f"{folder}/data", "-m", "immediate", "stop"])
    shutil.rmtree(folder)


def test_databases_add_up_and_keep_a_record_once(database: UsageDatabase) -> None:
    database.insert([record("a"), record("b", "u", "503", 0), record("c", "u")])
    database.insert([record("c", "u"), record("d")._replace(started=NOW + 86_400)])
    rows = database.totals(["tenant", "day"], 0, 1e12)
    assert [(r["tenant"], r["day"], r["requests"], r["completion_tokens"]) for r in rows] == [
        ("t", "2023-11-14", 1, 5),
        ("t", "2023-11-15", 1, 5),
        ("u", "2023-11-14", 2, 5),
    ]
    (sums,) = database.totals([], NOW, NOW + 1)
    assert (sums["requests"], sums["prompt_tokens"], sums["kv_byte_seconds"], sums["decode_s"]) == (
        3,
        30,
        37.5,
        0.75,
    )
    assert database.totals([], 0, 1)[0]["prompt_tokens"] == 0


def test_a_killed_process_loses_nothing_and_the_log_says_what_it_was_doing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The child meters three requests, is in the middle of a fourth, and has not written to the database at
    all."""
    script = (
        "import sys, time; from pathlib import Path; from splitserve.coordinator.tenants.meter import Meter\n"
        "from splitserve.coordinator.tenants.usage_record import UsageRecord\n"
        "folder = Path(sys.argv[1])\n"
        "meter = Meter(f'sqlite:///{folder}/usage', folder, 'journal-', write_every_s=1e6); meter.start()\n"
        "made = [UsageRecord(f'r{n}', 1.7e9, 't', 'k', 'm', 'e', 'free', '200', 3) for n in range(4)]\n"
        "[meter.began(r) for r in made]; [meter.ended(r) for r in made[:3]]\n"
        "print(flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    with left_behind(tmp_path, "journal-") as left:
        assert not left.paths  # it lives
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    caplog.set_level(logging.WARNING)
    meter = make(tmp_path, write_every_s=0.01)
    until(lambda: "killed" in caplog.text)
    meter.stop()
    assert statuses(tmp_path) == {"200": 3, "lost": 1}
    assert "3 requests of its journal had ended" in caplog.text
    assert "metered as lost: r3" in caplog.text
    assert not list(tmp_path.glob("journal-*"))


def test_a_request_that_began_in_one_journal_and_ended_in_the_next_is_not_lost(tmp_path: Path) -> None:
    for n, write in enumerate((UsageJournal.began, UsageJournal.ended)):
        journal = UsageJournal(journal_path(tmp_path, "journal-", n))
        write(journal, record("a"))
        os.close(journal._fd)
    torn = next(tmp_path.glob("journal-*"))
    torn.write_bytes(torn.read_bytes() + b'{"ended":["b",')
    with left_behind(tmp_path, "journal-") as left:
        assert ([r.id for r in left.ended], left.lost) == (["a"], [])


def test_a_database_that_is_away_is_caught_up_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter(f"sqlite:///{tmp_path}/usage", tmp_path, "journal-", write_every_s=0.01)
    database, meter._database = meter._database, open_database("postgresql://u@/x?host=/nonexistent")
    for n in range(3):
        meter.began(record(f"r{n}"))
        meter.ended(record(f"r{n}"))
    meter.start()
    until(lambda: "cannot be written, 3 records wait" in caplog.text)
    meter._database = database
    until(lambda: meter.num_waiting == 0)
    meter.stop()
    assert statuses(tmp_path) == {"200": 3}


def test_full_journals_go_when_the_database_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.coordinator.tenants.meter.MAX_JOURNAL_BYTES", 2000)
    meter = make(tmp_path, write_every_s=0.01)
    meter.began(record("open"))
    for n in range(200):
        meter.began(record(f"r{n}"))
        meter.ended(record(f"r{n}"))
    until(lambda: meter.num_waiting == 0 and len(list(tmp_path.glob("journal-*"))) == 1)
    meter.ended(record("open"))
    meter.stop()
    assert statuses(tmp_path) == {"200": 201}


def test_a_journal_goes_that_became_full_after_its_last_record_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may take a record before the loop has seen that its journal is full; no other may come for
    hours."""
    monkeypatch.setattr("splitserve.coordinator.tenants.meter.MAX_JOURNAL_BYTES", 0)
    meter = Meter(f"sqlite:///{tmp_path}/usage", tmp_path, "journal-")

    class TakenAtOnce(deque[UsageRecord]):
        def append(self, record: UsageRecord) -> None:
            super().append(record)
            meter._write()

    meter._pending = TakenAtOnce()
    meter.began(record("a"))
    meter.ended(record("a"))
    assert (meter.num_waiting, len(list(tmp_path.glob("journal-*")))) == (0, 2)
    meter._write()
    assert len(list(tmp_path.glob("journal-*"))) == 1
    meter.start()
    meter.stop()


async def test_sums_agree_with_the_metrics(
    tmp_path: Path, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    """Answers, streams, failures and clients that go away."""
    store = TenantStore(tmp_path / "tenants", create=True)
    keys = []
    for tenant in ("a", "b"):
        store.set_tenant(tenant)
        keys.append(store.create_key(tenant).key)
    meter = make(tmp_path, write_every_s=0.01)
    tenancy = Tenancy(KeyDirectory(tmp_path / "tenants"), meter=meter)
    server = HttpServer(HttpApp(dispatcher, model, AppParts(operators=Operators(ADMIN_KEY), tenancy=tenancy)))
    await server.start()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", verify=False, timeout=60
    ) as client:

        async def ask(n: int, **more: object) -> None:
            headers = {"authorization": f"Bearer {keys[n % 2]}"}
            await client.post(
                "/v1/completions",
                headers=headers,
                json={"prompt": "hello there", "max_tokens": 1 + n, "n": 1 + n % 2, **more},
            )

        await asyncio.gather(*(ask(n, stream=n % 3 == 0) for n in range(20)))
        dispatcher.hold = True
        gone = asyncio.create_task(ask(3, stream=True))
        await dispatcher.until(lambda: bool(dispatcher.running))
        gone.cancel()
        await dispatcher.until(lambda: not dispatcher.running)
        await ask(1, prompt=[])  # refused before it began: no record
        text = (await client.get("/metrics", headers=OPERATOR)).text
    await server.stop(grace_s=0)
    meter.stop()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def metric(name: str, **labels: str) -> float:
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    database = open_database(f"sqlite:///{tmp_path}/usage")
    (sums,) = database.totals([], 0, 1e12)
    assert sums["requests"] == 21
    assert sums["completion_tokens"] == metric("splitserve_generation_tokens_total") > 0
    assert sums["prompt_tokens"] == metric("splitserve_prompt_tokens_total") > 0
    assert sums["cached_tokens"] == metric("splitserve_prompt_tokens_cached_total") > 0
    for row in database.totals(["status"], 0, 1e12):
        assert row["requests"] == metric("splitserve_requests_total", status=row["status"])
    assert {row["tenant"]: row["requests"] for row in database.totals(["tenant"], 0, 1e12)} == {
        "a": 10,
        "b": 11,
    }
