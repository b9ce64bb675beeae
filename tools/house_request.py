"""Count the files of ours that one streamed chat executes, in each process of a small cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

READY_S = 300.0
IDLE_S = 10.0
MAX_TOKENS = 24
OFF, IDLE, REQUEST = "0", "1", "2"

Function = tuple[str, str, str]  # file, first line, qualified name


def files_of_a_request(root: Path) -> dict[str, list[str]]:
    """Files with a function that runs for the request and not while idle, by process: coordinator, prefill,
    decode."""
    with tempfile.TemporaryDirectory(prefix="house-") as folder:
        traces, phase = Path(folder, "traces"), Path(folder, "phase")
        traces.mkdir()
        phase.write_text(OFF)
        with _cluster(root, traces, phase, Path(folder, "log")) as url:
            _chat(url)  # what only the first request does, such as loading a table, is not counted
            _set(phase, IDLE)
            time.sleep(IDLE_S)
            _set(phase, REQUEST)
            _chat(url)
            time.sleep(1.0)  # reports of the end
            _set(phase, OFF)
        processes = [_read(path) for path in traces.iterdir()]
    return {_role(files): sorted(files) for files in processes if files}


def _set(phase: Path, value: str) -> None:
    """Overwrite in place: the processes map the file, and reading a map of a truncated file is a SIGBUS."""
    with phase.open("r+") as file:
        file.write(value)


def _read(path: Path) -> set[str]:
    called: dict[str, set[Function]] = defaultdict(set)
    for line in path.read_text(encoding="utf-8").splitlines():
        phase, *function = line.split("\t")
        called[phase].add((function[0], function[1], function[2]))
    return {file for file, _, _ in called[REQUEST] - called[IDLE]}


def _role(files: set[str]) -> str:
    return max(
        ("coordinator", "prefill", "decode"),
        key=lambda role: sum(file.startswith(role + "/") for file in files),
    )


@contextlib.contextmanager
def _cluster(root: Path, traces: Path, phase: Path, log: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"][
        "splitserve"
    ]
    module, _, function = script.partition(":")
    program = f"from {module} import {function}; {function}()"
    command = [sys.executable, "-c", program, "up", "--port", str(port)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "house_trace"), str(root / "src")]),
        "TRACE_ROOT": str(root),
        "TRACE_FOLDER": str(traces),
        "TRACE_PHASE": str(phase),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=root
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(lambda: _is_ready(url), process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        if condition():
            return
        time.sleep(0.2)
    raise SystemExit(f"the cluster did not start:\n{log.read_text()[-3000:]}")


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _chat(url: str) -> None:
    body = {
        "model": "splitserve-demo",
        "messages": [{"role": "user", "content": "What is a dictionary?"}],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    request = Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urlopen(request, timeout=120) as answer:
        events = [line for line in answer if line.startswith(b"data:")]
    if events[-1:] != [b"data: [DONE]\n"]:
        raise SystemExit(f"the stream did not end as it should: {events[-1:]}")
