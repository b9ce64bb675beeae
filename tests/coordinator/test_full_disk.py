"""A full disk: service goes on, or refuses with a sentence that names the path; what was not lost is written
once there is space."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest
from support.full_disk import CHAT, eventually
from support.small_disk import SmallDisk

from splitserve.cli.key_settings import KeysCreateSettings
from splitserve.cli.keys import create
from splitserve.coordinator.dispatcher import ClosedSink
from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.coordinator.metrics.trace_log import TraceLog
from splitserve.coordinator.tenants.errors import TenantsFileError
from splitserve.coordinator.tenants.limits import Account, Limits
from splitserve.coordinator.tenants.meter import Meter
from splitserve.coordinator.tenants.opening import KeyDirectory
from splitserve.coordinator.tenants.shared_limiter import SharedLimiter
from splitserve.coordinator.tenants.store import TenantStore
from splitserve.coordinator.tenants.tenancy import Admission
from splitserve.coordinator.tenants.usage_database import SQLITE, open_database
from splitserve.coordinator.tenants.usage_record import UsageRecord
from splitserve.traces.readers import open_trace
from splitserve.transport.messages.messages import SamplingParams


def until(condition: Callable[[], bool], what: str = "", timeout_s: float = 60.0) -> None:
    deadline = monotonic() + timeout_s
    while not condition():
        assert monotonic() < deadline, what
        time.sleep(0.02)


# --- the trace file --------------------------------------------------------------------------------


def ended(log: TraceLog) -> None:
    now = monotonic()
    request = Request("name", list(range(1000)), SamplingParams(max_tokens=9), ClosedSink(), now, now + 60)
    log.note(request, Ended("length", num_output_tokens=5))


def test_a_trace_begins_when_there_is_space(disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    disk.fill()
    log = TraceLog(disk.path / "traces", longest_request_s=60)
    assert f"there is no space for {log.path}" in caplog.text
    with pytest.raises(OSError, match=r"No space left on device: .*requests-"):
        ended(log)
    disk.free()
    ended(log)
    log.close()
    assert len(list(open_trace(log.path))) == 1


def test_a_row_is_whole_or_absent_on_a_disk_that_becomes_full(disk: SmallDisk) -> None:
    log = TraceLog(disk.path, longest_request_s=60)
    disk.fill()
    num_rows = 0
    with suppress(OSError):
        while num_rows < 100:  # the rest of the last page takes some
            ended(log)
            num_rows += 1
    assert num_rows < 100
    disk.free()
    ended(log)
    log.close()
    assert len(list(open_trace(log.path))) == num_rows + 1


# --- metering and limits ---------------------------------------------------------------------------


def record(number: int) -> UsageRecord:
    return UsageRecord(f"r{number}", 1.7e9, "t", "key_1", "m", CHAT, "standard", "200", 10, 4, 5)


def metered(folder: Path) -> int:
    database = open_database(f"{SQLITE}{folder / 'usage.db'}")
    (sums,) = database.totals((), 0.0, 2e9)
    database.close()
    return int(sums["requests"])


def meter_in(folder: Path) -> Meter:
    meter = Meter(f"{SQLITE}{folder / 'usage.db'}", folder, "journal-", write_every_s=0.02)
    meter.start()
    return meter


@pytest.mark.parametrize("full_at_start", [False, True])
def test_metering_waits_in_memory_and_loses_nothing(
    full_at_start: bool, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    if full_at_start:
        disk.fill()
    meter = meter_in(disk.path)
    disk.fill()
    for number in range(2000):
        meter.began(record(number))
        meter.ended(record(number))
    until(lambda: "records wait in memory and in the journal" in caplog.text, caplog.text)
    assert meter.failures.counts["usage journal"] > 0
    assert caplog.text.count("usage journal has failed, requests go on without it") == 1
    assert str(disk.path) in caplog.text
    disk.free()
    until(lambda: meter.num_waiting == 0)
    meter.stop()
    assert metered(disk.path) == 2000
    assert not list(disk.path.glob("journal-*"))


def test_what_memory_cannot_hold_is_said_loudly(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("splitserve.coordinator.tenants.meter.MAX_WAITING", 100)
    meter = Meter(
        f"{SQLITE}{disk.path / 'usage.db'}", disk.path, "journal-"
    )  # not started: the database never answers
    for number in range(150):
        meter.ended(record(number))
    assert meter.num_waiting == 100
    assert "more than 100 records wait for the usage database" in caplog.text
    assert "NOT BILLED" in caplog.text
    meter.start()
    meter.stop()
    assert metered(disk.path) == 100
    os.close(meter._journal._fd)  # as the end of its process does
    later = meter_in(disk.path)
    until(lambda: metered(disk.path) == 150, "the next start finds the others in the journal")
    later.stop()


@pytest.mark.parametrize("full_at_start", [False, True])
async def test_limits_hold_in_memory(
    full_at_start: bool, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    if full_at_start:
        disk.fill()
    limiter = SharedLimiter(disk.path / "limits", clock=lambda: 1e9)
    disk.fill()
    for tenant in (1, 5000):  # of the first page, and of one that is not there yet
        account = Account(tenant="t", tenant_id=tenant, key_id=7, tenant_limits=Limits(requests_per_minute=3))
        answers: list[object] = []
        for _ in range(5):
            limiter.admit(account, 10, answers.append)
        assert [type(answer) is Admission for answer in answers] == [True] * 3 + [False] * 2
    await limiter.stop()
    assert f"there is no space for the limits file {disk.path / 'limits'}" in caplog.text


async def test_keys_open_on_a_full_disk_and_changes_are_seen_once_there_is_space(disk: SmallDisk) -> None:
    path = disk.path / "tenants.db"
    store = TenantStore(path, create=True)
    store.set_tenant("acme")
    key = store.create_key("acme")
    store.close()
    disk.fill()
    directory = KeyDirectory(path)
    account = directory.account(f"Bearer {key.key}".encode())
    assert account.tenant == "acme"
    disk.free()
    following = asyncio.create_task(directory.follow(every_s=0.01))
    await eventually(lambda: not directory.frozen)
    store = TenantStore(path)
    store.revoke_key(key.id)
    store.close()
    await eventually(lambda: directory.account_of_key(account.key_id) is None)
    following.cancel()
    directory.close()


def test_a_key_that_finds_no_space_is_refused_with_the_files_name(disk: SmallDisk) -> None:
    path = disk.path / "tenants.db"
    settings = KeysCreateSettings(tenants_file=path, tenant="acme")
    create(settings)
    coordinators = TenantStore(path)  # keeps SQLite's own files there
    assert coordinators.tenants()
    disk.fill()

    def create_many() -> None:
        for _ in range(100):  # the last page may have some room
            create(settings)

    with pytest.raises(TenantsFileError, match=rf"cannot use the tenants file {path}: .* full"):
        create_many()
    coordinators.close()
