"""Logs as JSON, and a level that changes while a process runs."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from support.http_fakes import FakeDispatcher
from support.spawned import signalled_at_once

from splitserve.cli.local_cluster import json_log, prefixed_log
from splitserve.coordinator.lifecycle.time_ledger import TimeLedger
from splitserve.coordinator.metrics.request_record import RequestRecord, log_request
from splitserve.coordinator.processes import CoordinatorProcess
from splitserve.coordinator.routes.admin import AdminRoutes
from splitserve.coordinator.routes.routes import error_handlers
from splitserve.coordinator.settings import CoordinatorSettings
from splitserve.deploy.child_process import ChildProcess, Command
from splitserve.deploy.process_log import JsonFormatter

PROGRAM = """
import logging, os, signal
from splitserve.deploy.process_log import log_to_stderr
log_to_stderr("info", "json", "decode-0")
logging.debug("hidden")
os.kill(os.getpid(), signal.SIGUSR2)
logging.debug("seen", extra={"fields": {"request_id": "r1"}})
os.kill(os.getpid(), signal.SIGUSR2)
logging.debug("hidden")
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("broke")
"""


def test_a_process_logs_json_and_a_signal_turns_debug_on_and_off() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=True
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["message"] for line in lines] == [
        "log level is now debug",
        "seen",
        "log level is now info",
        "broke",
    ]
    assert {line["process"] for line in lines} == {"decode-0"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", lines[0]["time"])
    assert (lines[1]["level"], lines[1]["request_id"]) == ("debug", "r1")
    assert "ZeroDivisionError" in lines[3]["exception"]


EARLY_PROGRAM = """
import os, signal
os.kill(os.getpid(), signal.SIGUSR2)
from splitserve.deploy.process_log import log_to_stderr
log_to_stderr("info", "text", "decode-0")
"""


async def test_the_signal_waits_for_a_process_that_has_just_been_started() -> None:
    lines: list[str] = []
    command = Command("decode-0", [sys.executable, "-c", EARLY_PROGRAM], dict(os.environ))
    assert await ChildProcess(command, lambda _, line: lines.append(line)).run() == 0
    assert len(lines) == 1
    assert "log level is now debug" in lines[0]


def test_the_signal_does_not_kill_one_of_several_coordinator_processes_that_has_just_been_started() -> None:
    settings = CoordinatorSettings(model=Path("model"), insecure=True)
    process = CoordinatorProcess(settings, 0, signalled_at_once)
    process.keep_running(0.0)
    process.join(time.monotonic() + 60)
    assert process.exitcode == 0


def test_each_request_is_a_line_with_its_id_and_its_stages(caplog: pytest.LogCaptureFixture) -> None:
    ledger = TimeLedger("parse", 1.0)
    ledger.enter("decode", 1.5)
    ledger.close(3.0)
    record = RequestRecord(
        "cmpl-1",
        "/v1/completions",
        "200",
        ledger,
        ledger.stages(),
        2.0,
        10,
        4,
        7,
        1,
        "p0",
        "d0",
        "acme",
        num_images=2,
    )
    with caplog.at_level(logging.INFO):
        log_request(record)
    (logged,) = [message for message in caplog.records if message.name == log_request.__module__]
    assert logged.getMessage() == (
        "cmpl-1 200 in 2000.0 ms (parse 500.0, decode 1500.0): 10 prompt tokens (4 cached), 7 "
        "output tokens, 2 images, p0 to d0"
    )
    line = json.loads(JsonFormatter("coordinator").format(logged))
    assert (line["request_id"], line["tenant"], line["seconds"]) == ("cmpl-1", "acme", 2.0)
    assert line["images"] == 2
    assert sum(line["stages"].values()) == pytest.approx(line["seconds"], rel=0.01)


async def test_an_operator_changes_the_level() -> None:
    app = Starlette(
        routes=AdminRoutes({"tiny": FakeDispatcher(lambda request: [])}).routes(),
        exception_handlers=error_handlers(),
    )
    before = logging.getLogger().level
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            assert (await http.post("/admin/log-level/error")).json() == {"level": "error"}
            assert logging.getLogger().level == logging.ERROR
            refused = await http.post("/admin/log-level/loud")
            assert refused.status_code == 400
            assert "debug, info, warning, error" in refused.json()["error"]["message"]
    finally:
        logging.getLogger().setLevel(before)


def test_a_local_cluster_passes_json_on_and_makes_json_of_the_rest() -> None:
    stream = io.StringIO()
    log = json_log(stream)
    log("decode-0", '{"message":"hello"}')
    log("decode-0", "Segmentation fault")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first == {"message": "hello"}
    assert (second["process"], second["message"]) == ("decode-0", "Segmentation fault")


def test_a_log_on_a_full_disk_costs_lines_and_no_process(tmp_path: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        log = prefixed_log(full, ["coordinator"])
        for number in range(3):
            log("coordinator", f"line {number}")
        os.dup2(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), full.fileno())  # there is space again
        log("coordinator", "line 3")
    message = (tmp_path / "log").read_text()
    assert "line 3\n" in message
    assert "about 3 lines before this one are lost: there was no space" in message
