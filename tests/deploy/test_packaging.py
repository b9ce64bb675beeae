"""The container file and the systemd units, read by the programs that use them where these are here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DOCKERFILE = DEPLOY / "container" / "Dockerfile"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def stages() -> dict[str, str]:
    """The container file's instructions by stage, with those of the stage that it begins with."""
    found: dict[str, str] = {}
    for part in re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.M)[1:]:
        base, _, name = part.partition("\n")[0].partition(" AS ")
        found[name] = found.get(base, "") + part
    return found


@pytest.mark.parametrize("target", ["cpu", "cuda", "operator"])
def test_an_image_has_no_compiler_of_the_build_drains_and_is_not_root(target: str) -> None:
    stage = stages()[target]
    assert re.search(r"^USER 10001$", stage, re.M)
    assert re.search(r"^STOPSIGNAL SIGTERM$", stage, re.M)
    assert re.search(r"^HEALTHCHECK .*health\.py", stage, re.M)
    assert re.search(r"^COPY --from=build /opt/splitserve", stage, re.M)
    assert "g++" not in stage


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_the_container_file_passes_hadolint() -> None:
    done = subprocess.run(["hadolint", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        (tmp_path / unit.name).write_text(
            unit.read_text().replace("/opt/splitserve/bin/splitserve", "/bin/true")
        )
    names = [str(tmp_path / unit.name) for unit in UNITS]
    done = subprocess.run(
        ["systemd-analyze", "verify", *names], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_gives_more_time_than_a_drain_takes(unit: Path) -> None:
    [seconds] = re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.M)
    assert int(seconds) > 10
    assert "\nKillMode=mixed\n" in unit.read_text(), "one process stops the others of its unit"


class Health(BaseHTTPRequestHandler):
    """Answers /health with the status of its server."""

    def do_GET(self) -> None:
        status = self.server.status  # type: ignore[attr-defined]
        self.send_response(status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1), (None, 1)])
def test_the_health_check_asks_the_coordinator(tmp_path: Path, status: int | None, expected: int) -> None:
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        server.status = status  # type: ignore[attr-defined]
        if status is not None:
            run = tmp_path / "splitserve-0" / "run-x"
            run.mkdir(parents=True)
            (run / "coordinator-0.json").write_text(
                json.dumps({"url": f"http://127.0.0.1:{server.server_port}"})
            )
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        done = subprocess.run(
            [sys.executable, str(DEPLOY / "container" / "health.py")],
            env={"TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        server.shutdown()
        thread.join()
    assert done.returncode == expected, done.stderr
