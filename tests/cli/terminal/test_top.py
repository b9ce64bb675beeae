"""``splitserve top`` in a terminal, and what it shows."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from rich.console import Console

from splitserve.cli.terminal.top_view import Picture, render
from splitserve.coordinator.dashboard.live_view import LiveView
from splitserve.coordinator.lifecycle.time_ledger import TimeLedger
from splitserve.coordinator.metrics.request_record import RequestRecord
from splitserve.coordinator.metrics.system_snapshot import SystemSnapshot, WorkerSnapshot
from splitserve.transport.process.private_files import private, write_private

GAUGES = {"gpu_utilization_ratio": 0.83, "gpu_power_watts": 512.4}
WORKERS = [
    WorkerSnapshot("prefill-0", "prefill", 100, 90, 10, 0, 0, 0, 0, 0, 5),
    WorkerSnapshot(
        "decode-[b]0", "decode", 100, 50, 20, 30, 0, 2, 0, 0, 5, gauges=GAUGES, adapters=["sql", "[b]"]
    ),
]
STEERING = {
    "mode": "advise",
    "state": "7P:1D is the best ratio",
    "load": {"prefill": 1.25, "decode": 0.5},
    "decisions": [
        {"ago_s": 64.0, "kind": "flip", "worker": "worker-3", "role": "prefill", "reason": "prompts wait"}
    ],
}
KEY = "k" * 32
PATIENT_TOP = (
    "from splitserve.cli.main import main; from splitserve.cli.terminal import top; "
    "top.PATIENCE_S = 60; main()"
)


def live_view() -> LiveView:
    view = LiveView(0.0, 1e9)
    ledger = TimeLedger("parse", 1.0)
    for at, stage in enumerate(("queue", "prefill", "handoff", "decode", "coordinator", "stream"), 2):
        ledger.enter(stage, float(at))  # type: ignore[arg-type]
    ledger.close(8.0)
    view.note(
        RequestRecord(
            "cmpl-abc1",
            "/v1/completions",
            "200",
            ledger,
            ledger.stages(),
            4.0,
            1234,
            1000,
            56,
            1,
            "p",
            "d",
            "acme",
        )
    )
    view.sample(8.0, SystemSnapshot(workers=WORKERS))
    return view


@pytest.fixture
def coordinator() -> Iterator[str]:
    """Its feed, for operators only; the address."""
    view = live_view()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {name: int(values[0]) for name, values in parse_qs(urlsplit(self.path).query).items()}
            allowed = self.headers.get("authorization") == f"Bearer {KEY}"
            state = view.state(8.0, SystemSnapshot(ready=True, workers=WORKERS), **known)
            refused = {"error": {"message": "This needs the admin key."}}
            body = json.dumps({"boot": "1", "model": "tiny", **state} if allowed else refused).encode()
            self.send_response(200 if allowed else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def picture() -> Picture:
    system = SystemSnapshot(ready=True, workers=WORKERS, steering=STEERING)
    state = {"model": "tiny", **live_view().state(8.0, system)}
    return Picture("http://x", state, state["points"], state["requests"])


@pytest.mark.parametrize("width", [80, 160])
def test_the_picture(width: int) -> None:
    console = Console(width=width, height=40, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(render(picture(), width, 40))
    console.file.close()
    text = console.export_text()
    assert "splitserve tiny  ready  up 0 min 8 s" in text
    assert "Too few requests to tell: 1 answered in the last minute, 20 are needed." in text
    assert re.search(r"decode-\[b\]0 +decode +█+▓*▒+─+ +30% +20% +2 +0", text)
    assert width < 100 or "GPU 83% 512 W  2 adapters" in text
    assert "pool controller (advise)  load 125% prefill, 50% decode  7P:1D is" in text
    assert "1 min 4 s ago: worker-3 to prefill: prompts wait" in text
    assert re.search(r"time to first token +3.00 s", text)
    assert re.search(r"acme +1 +1,234 +1,000 +56", text)
    assert re.search(r"abc1 +200 +█+ +7.00 s +1,234 +56", text)
    assert max(len(line) for line in text.splitlines()) <= width


def test_without_colours_each_part_has_its_letter() -> None:
    console = Console(width=160, height=40, file=io.StringIO(), record=True, no_color=True)
    console.print(render(picture(), 160, 40, coloured=False))
    console.file.close()
    text = console.export_text()
    assert "a parse  q queue  p prefill  h handoff  d decode  c coordinator  s stream" in text
    assert re.search(r"abc1 +200 +a+q+p+h+d+c+s+ +7.00 s", text)
    assert re.search(r"decode-\[b\]0 +decode +█+▓*▒+─+ ", text), (
        "used, promised and cached blocks are told apart too"
    )


def test_q_leaves_the_terminal_as_it_was(coordinator: str, tmp_path: object) -> None:
    key_file = os.path.join(str(tmp_path), "key")
    with open(key_file, "w", opener=private) as file:
        file.write(KEY)
    keyboard, terminal = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "splitserve.cli.main",
        "top",
        "--url",
        coordinator,
        "--admin-key-file",
        key_file,
    ]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, preexec_fn=own_terminal
    ) as process:
        os.close(terminal)
        seen = read_until(keyboard, b"prefill-0")
        assert b"\x1b[?1049h" in seen  # on a screen of its own
        os.write(keyboard, b"q")
        assert b"\x1b[?1049l" in read_until(keyboard, b"\x1b[?1049l")
        assert process.wait(60) == 0
    os.close(keyboard)


def test_without_a_terminal_it_prints_once_or_says_why_not(coordinator: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PATIENT_TOP, "top", "--url", coordinator]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (refused.returncode, refused.stderr) == (1, "splitserve: This needs the admin key.\n")
    write_private(tmp_path / "key", KEY)
    command += ["--admin-key-file", str(tmp_path / "key")]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert re.search(
        r"time to first token +3\.00 s +3\.00 s +3\.00 s", shown.stdout
    )  # nothing is cut off for want of columns


def own_terminal() -> None:
    """Standard input becomes the terminal that controls the new process."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_until(terminal: int, wanted: bytes, timeout_s: float = 60.0) -> bytes:
    seen, deadline = b"", time.monotonic() + timeout_s
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{wanted!r} did not come, but {seen[-500:]!r}"
        seen += os.read(terminal, 65536)
    return seen
