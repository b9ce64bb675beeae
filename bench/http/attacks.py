"""Attacks over HTTP against a server that this command starts, and their cost for it and other clients.

    python -m splitserve.bench.http.attacks [--splitserve PATH] [--only NAME ...] [--times 10] \\
        [--json bench/results/attacks.json]
    python -m splitserve.bench.http.attacks --load-minutes 30        memory under ordinary load

`--splitserve` is the command of any build (a script that runs it will do), so that builds can be compared;
`--label` names its rows in the record. All stays on loopback and ends by itself; a server whose coordinator
exceeds `--most-gb` is killed, and the row notes it.

For each attack: answers by status; memory of the coordinator with its own processes before, at most, and 3 s
after; the longest gap in another client's stream and the slowest /health meanwhile, and the gap without any
attack. An attack is a function that takes a ``Target`` and returns answers by status: to add one, add it to
``ATTACKS``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from ...cli.settings import DEMO_MODEL
from ...cli.up import free_port
from ..environment import environment
from .bystander import EVERY_S, beside

BODY_BYTES = 15 << 20
PATIENCE_S = 60.0  # of an attacker, for an answer
QUIET_S = 10.0  # without an attack: the baseline
REST_S = 3.0
STREAM_TOKENS = 1900
START_S = 180.0
SAMPLE_S = 0.05
MAX_GROWTH_MB = 16.0  # from the second quarter of a load to its last


@dataclass(frozen=True)
class Target:
    """The server under attack. ``times``: how many times the clients that first showed the defect."""

    port: int
    times: int


@dataclass(frozen=True)
class Attack:
    """``run`` must end by itself. ``max_files``: the server's limit of open files."""

    name: str
    run: Callable[[Target], Counter[str]]
    max_files: int | None = None


@dataclass
class Row:
    """MB and seconds."""

    name: str
    label: str
    answers: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    before_mb: float = 0.0
    most_mb: float = 0.0
    after_mb: float = 0.0
    longest_gap_s: float = 0.0
    quiet_gap_s: float = 0.0
    slowest_health_s: float = 0.0
    health_failures: int = 0
    stream_failures: int = 0
    killed: str = ""


# --- attacks -------------------------------------------------------------------------------------


def post(target: Target, path: str, body: bytes, *, unsent: int = 0) -> socket.socket:
    """A request on a connection of its own, without its last bytes."""
    connection = socket.create_connection(("127.0.0.1", target.port), timeout=PATIENCE_S)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\nContent-Type: "
        f"application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode())
    connection.sendall(memoryview(body)[: len(body) - unsent])
    return connection


def answer(connection: socket.socket) -> str:
    """The status; "closed" where there is none."""
    with suppress(OSError):
        line = connection.recv(64)
        if line.startswith(b"HTTP/1.1 "):
            return line[9:12].decode()
    return "closed"


def at_once(count: int, work: Callable[[], str]) -> Counter[str]:
    """Run ``work`` on ``count`` threads at once."""
    found: Counter[str] = Counter()

    def one() -> None:
        try:
            result = work()
        except OSError as error:
            result = type(error).__name__
        found[result] += 1

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def bombs(
    path: str, clients: int, make: Callable[[], dict[str, Any] | bytes]
) -> Callable[[Target], Counter[str]]:
    """The same large body from ``count`` clients, a few at a time."""

    def run(target: Target) -> Counter[str]:
        made = make()
        body = made if isinstance(made, bytes) else json.dumps(made).encode()

        def one() -> str:
            with post(target, path, body) as connection:
                return answer(connection)

        found: Counter[str] = Counter()
        for _ in range(target.times):
            found += at_once(clients, one)
        return found

    return run


def unfinished_bodies(target: Target) -> Counter[str]:
    body, held = b" " * BODY_BYTES, []
    found: Counter[str] = Counter()
    for _ in range(30 * target.times):
        try:
            held.append(post(target, "/v1/completions", body, unsent=1))
        except OSError as error:
            found[type(error).__name__] += 1
    time.sleep(1)
    return found + answers_of(held)


def unfinished_messages(target: Target) -> Counter[str]:
    handshake = (
        f"GET /v1/stream HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\nUpgrade: websocket\r\nConnection: "
        "Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    frame, held = b"\x81\xff" + BODY_BYTES.to_bytes(8) + bytes(4) + b" " * (BODY_BYTES - 1), []
    found: Counter[str] = Counter()
    for _ in range(30 * target.times):
        try:
            connection = socket.create_connection(("127.0.0.1", target.port), timeout=PATIENCE_S)
            held.append(connection)
            connection.sendall(handshake.encode())
            connection.recv(4096)
            connection.sendall(frame)
        except OSError as error:
            found[type(error).__name__] += 1
    time.sleep(1)
    return found + answers_of(held)


def idle_connections(target: Target) -> Counter[str]:
    """Each asks once, and stays."""
    held, found = [], Counter[str]()
    for _ in range(228 * target.times):
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", target.port), timeout=5)
            held.append(connection)
            connection.sendall(f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n\r\n".encode())
            found[answer(connection)] += 1
            continue
        found["failed"] += 1
    for connection in held:
        connection.close()
    return found


def answers_of(held: list[socket.socket]) -> Counter[str]:
    """Answers to clients that have not finished; closes them."""
    found: Counter[str] = Counter()
    for connection in held:
        connection.setblocking(False)
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            found["still open"] += 1
        except OSError:
            found["closed"] += 1
        else:
            found[data[9:12].decode() if data.startswith(b"HTTP") else "closed"] += 1
        connection.close()
    return found


def tools() -> dict[str, Any]:
    wide = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "description": "x" * 40} for i in range(1200)},
    }
    chosen = [{"type": "function", "function": {"name": f"f{i}", "parameters": wide}} for i in range(128)]
    return {"messages": [{"role": "user", "content": "a"}], "tools": chosen, "tool_choice": "required"}


def parts() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 400_000}]}


def schema() -> dict[str, Any]:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400_000)}}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": wide}}
    return {"messages": [{"role": "user", "content": "a"}], "response_format": shape}


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ATTACKS = [
    Attack("tokenization", bombs(TEXT, 4, lambda: {"prompt": "the quick brown fox " * (BODY_BYTES // 20)})),
    Attack(
        "logit_bias",
        bombs(TEXT, 2, lambda: {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1_000_000)}}),
    ),
    Attack("ids", bombs(TEXT, 2, lambda: b'{"prompt":[' + b"1," * 7_900_000 + b"1]}")),
    Attack("schema", bombs(CHAT, 2, schema)),
    Attack("tools", bombs(CHAT, 2, tools)),
    Attack("message parts", bombs(CHAT, 2, parts)),
    Attack("choices", bombs(TEXT, 2, lambda: {"prompt": ["a"] * 32, "n": 128, "max_tokens": 1})),
    Attack("unfinished bodies", unfinished_bodies),
    Attack("unfinished messages", unfinished_messages),
    Attack("descriptors", idle_connections, max_files=256),
]


# --- the server ----------------------------------------------------------------------------------


@contextmanager
def served(command: list[str], max_files: int | None) -> Iterator[tuple[int, psutil.Process]]:
    """The port, and the coordinator's process."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *command,
            "up",
            "--model",
            str(DEMO_MODEL),
            "--port",
            str(port),
            "--run-dir",
            str(Path(folder) / "run"),
        ]
        shell = (
            f"ulimit -n {max_files}; exec {shlex.join(arguments)}"
            if max_files
            else f"exec {shlex.join(arguments)}"
        )
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", shell],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        try:
            deadline = time.monotonic() + START_S
            while not ready(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"the server did not start: {(Path(folder) / 'log').read_text()[-2000:]}"
                    )
                time.sleep(0.2)
            yield port, coordinator_of(process.pid, port)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def coordinator_of(pid: int, port: int) -> psutil.Process:
    """The process that listens."""
    parent = psutil.Process(pid)
    for process in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.Error):
            if any(
                c.laddr.port == port and c.status == psutil.CONN_LISTEN
                for c in process.net_connections("tcp")
            ):
                return process
    raise RuntimeError("no process of the server listens")


class Watch(threading.Thread):
    """Samples the memory of a coordinator and its own processes; kills it beyond a bound."""

    def __init__(self, process: psutil.Process, most_mb: float) -> None:
        super().__init__(daemon=True)
        self.most, self.killed = 0.0, ""
        self._process, self._most_mb, self._stopping = process, most_mb, threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(SAMPLE_S):
            self.most = max(self.most, now := memory_mb(self._process))
            if now > self._most_mb:
                self.killed = f"killed at {now:.0f} MB"
                self._process.kill()
                return
            if not self._process.is_running():
                self.killed = "died"
                return

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def memory_mb(process: psutil.Process) -> float:
    total = 0
    with suppress(psutil.Error):
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                total += one.memory_info().rss
    return total / 1e6


# --- measuring -----------------------------------------------------------------------------------


def measure(
    attack: Attack, port: int, process: psutil.Process, options: argparse.Namespace, quiet_gap_s: float
) -> Row:
    row = Row(
        attack.name, options.label, quiet_gap_s=round(quiet_gap_s, 3), before_mb=round(memory_mb(process), 1)
    )
    watch = Watch(process, 1000 * options.most_gb)
    with beside(port, STREAM_TOKENS) as bystander:
        bystander.wait()
        watch.start()
        begin = time.monotonic()
        row.answers = dict(sorted(attack.run(Target(port, options.times)).items()))
        row.seconds = round(time.monotonic() - begin, 1)
        time.sleep(2 * EVERY_S)
        _, gap, health, row.health_failures, row.stream_failures = bystander.seen
    watch.stop()
    time.sleep(REST_S)
    row.longest_gap_s, row.slowest_health_s = round(gap, 3), round(health, 3)
    row.most_mb, row.killed = round(watch.most, 1), watch.killed
    row.after_mb = round(memory_mb(process), 1)
    return row


def attacked(attacks: list[Attack], options: argparse.Namespace) -> Iterator[Row]:
    """One server for all with the same bound on files; another one after it was killed."""
    left = sorted(attacks, key=lambda attack: attack.max_files or 0)
    while left:
        max_files = left[0].max_files
        with served(shlex.split(options.splitserve), max_files) as (port, process):
            with beside(port, STREAM_TOKENS) as bystander:
                bystander.wait()
                time.sleep(options.quiet_s)
                quiet_gap_s = bystander.seen.longest_gap_s
            while left and left[0].max_files == max_files:
                row = measure(left.pop(0), port, process, options, quiet_gap_s)
                yield row
                if row.killed:
                    break


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Small requests, streams, and large bodies of all kinds from time to time; memory every 5 s."""
    samples: list[float] = []
    large = [
        attack for attack in ATTACKS if attack.name in ("tokenization", "logit_bias", "ids", "message parts")
    ]
    with (
        served(shlex.split(options.splitserve), None) as (port, process),
        beside(port, STREAM_TOKENS) as bystander,
    ):
        deadline, sampled, turn = time.monotonic() + 60 * options.load_minutes, 0.0, 0
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            while time.monotonic() < deadline:
                for i in range(20):
                    client.post(TEXT, json={"prompt": f"{turn} {i} " + "word " * (i * 10), "max_tokens": 8})
                client.post(
                    TEXT, json={"prompt": "x " * 40_000, "truncate_prompt_tokens": 100, "max_tokens": 2}
                )
                if turn % 20 == 0:
                    large[turn // 20 % len(large)].run(Target(port, 1))
                turn += 1
                if time.monotonic() > sampled + 5:
                    sampled = time.monotonic()
                    samples.append(round(memory_mb(process), 1))
        _, gap, health, *failures = bystander.seen
    quarter = max(1, len(samples) // 4)
    early, late = (
        sum(some) / len(some) for some in (samples[quarter : 2 * quarter] or samples, samples[-quarter:])
    )
    figures = {
        "minutes": options.load_minutes,
        "turns": turn,
        "second_quarter_mb": round(early, 1),
        "last_quarter_mb": round(late, 1),
    }
    return {
        **figures,
        "longest_gap_s": round(gap, 3),
        "slowest_health_s": round(health, 3),
        "failures": failures,
        "samples_mb": samples,
    }


def table(rows: list[Row]) -> str:
    lines = [
        "| attack | build | answers | before, most, after MB | longest gap (quiet) s | slowest /health s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        answers = row.killed or ", ".join(f"{count} x {status}" for status, count in row.answers.items())
        health = f"{row.slowest_health_s:.2f}" + (
            f", {row.health_failures} failed" if row.health_failures else ""
        )
        memory = f"{row.before_mb:.0f}, {row.most_mb:.0f}, {row.after_mb:.0f}"
        lines.append(
            f"| {row.name} | {row.label} | {answers} | {memory} | {row.longest_gap_s:.2f} "
            f"({row.quiet_gap_s:.2f}) | {health} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--splitserve", default=f"{sys.executable} -m splitserve.cli", help="the command of the build"
    )
    parser.add_argument("--label", default="now", help="what the record calls it")
    parser.add_argument(
        "--only", nargs="*", choices=[attack.name for attack in ATTACKS], help="these attacks"
    )
    parser.add_argument(
        "--times", type=int, default=10, help="how many times as many clients as first showed the defect"
    )
    parser.add_argument("--most-gb", type=float, default=4.0, help="a coordinator that takes more is killed")
    parser.add_argument("--quiet-s", type=float, default=QUIET_S, help="seconds of the baseline")
    parser.add_argument(
        "--load-minutes", type=float, help="no attacks: ordinary load, and whether memory stays level"
    )
    parser.add_argument(
        "--json", type=Path, help="put the rows into this record, in place of those of the same label"
    )
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.load_minutes:
        result = load(options)
        print(json.dumps(result))
        return 1 if result["last_quarter_mb"] > result["second_quarter_mb"] + MAX_GROWTH_MB else 0
    rows = []
    for row in attacked(
        [attack for attack in ATTACKS if not options.only or attack.name in options.only], options
    ):
        rows.append(row)
        print(json.dumps(asdict(row)), flush=True)
    print(table(rows))
    if options.json:
        record = json.loads(options.json.read_text()) if options.json.exists() else {"rows": []}
        new = {(row.label, row.name) for row in rows}
        kept = [row for row in record["rows"] if (row["label"], row["name"]) not in new]
        record = {"environment": environment(), "rows": [*kept, *map(asdict, rows)]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if any(row.killed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
