"""A thread of a worker that fails ends the worker: half alive it would hang requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from e2e.cluster import free_port

from splitserve.cli.settings import DEMO_MODEL
from splitserve.transport.channels.keys import generate_key

MISTAKEN = """
from splitserve.transport.channels import authenticator

def mistaken(self):
    with self._socket:
        raise RuntimeError("a mistake of ours")

authenticator.Authenticator._serve = mistaken
from splitserve.cli.main import main
main()
"""


def test_a_thread_that_fails_ends_the_worker(tmp_path: Path) -> None:
    generate_key(tmp_path / "key")
    arguments = [
        "decode",
        "--model",
        str(DEMO_MODEL),
        "--key-file",
        str(tmp_path / "key"),
        "--kv-cache-gib",
        "0.01",
    ]
    coordinator = ["--coordinator", f"tcp://127.0.0.1:{free_port()}"]
    ended = subprocess.run(
        [sys.executable, "-c", MISTAKEN, *arguments, *coordinator],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "background work has failed (zmq-authenticator)" in ended.stderr
    assert "RuntimeError: a mistake of ours" in ended.stderr
