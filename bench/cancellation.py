"""Clients hang up at random moments of their requests: how soon every KV block is free on both workers.

    python -m splitserve.bench.cancellation --json bench/results/cancellation.json

A time runs from the client's close to the first look at /debug/state that finds no block in use and no
request anywhere. So it holds the socket's way to the coordinator, the workers' running steps, and what the
method adds: a worker's next heartbeat, and the look itself (``method_s``: the longest that these two take
together). The goal is 100 ms from a worker's next loop turn. The bundled model, one prefill and one decode
worker.
"""

from __future__ import annotations

import json
import random
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from ..cli.settings import DEMO_MODEL_NAME
from .environment import environment, option_parser, write_record
from .http.raw_client import request_bytes
from .live_cluster import live_cluster
from .operator_auth import OperatorAuth

HEARTBEAT_S = 0.05
LONGEST_WAIT_S = 0.5
PROMPT_CHARACTERS = (20, 400, 4000)
FREED_S = 30.0


def hang_up_after(url: str, body: dict[str, Any], wait_s: float) -> float:
    """Request a stream, close the connection after ``wait_s`` seconds, and return the monotonic time."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 5) as client:
        client.sendall(request_bytes("/v1/completions", body))
        time.sleep(wait_s)
    return time.monotonic()


def measure(url: str, count: int, seed: int) -> dict[str, Any]:
    """Seconds until all is free, and of the looks at it."""
    draw = random.Random(seed)
    freed: list[float] = []
    looks: list[float] = []
    with httpx.Client(base_url=url, timeout=10, auth=OperatorAuth()) as http:
        for number in range(count):
            prompt = "".join(draw.choice("abcdefgh \n") for _ in range(draw.choice(PROMPT_CHARACTERS)))
            body = {
                "model": DEMO_MODEL_NAME,
                "prompt": prompt,
                "max_tokens": 1000,
                "ignore_eos": True,
                "stream": True,
                "n": 1 + number % 2,
            }
            closed = hang_up_after(url, body, draw.uniform(0, LONGEST_WAIT_S))
            while True:
                asked = time.monotonic()
                rests = _at_rest(http)
                looks.append(time.monotonic() - asked)
                if rests:
                    break
                if asked - closed > FREED_S:
                    raise SystemExit(f"blocks are still held {FREED_S:g} s after the client has gone")
            freed.append(time.monotonic() - closed)
    return {
        "count": count,
        "freed_s": _percentiles(freed),
        "method_s": round(HEARTBEAT_S + max(looks), 4),
        "look_s": _percentiles(looks),
    }


def _at_rest(http: httpx.Client) -> bool:
    state = http.get("/debug/state").json()
    idle = state["requests"] == {"queued": 0, "running": 0}
    return idle and not any(worker["blocks"]["used"] or worker["held"] for worker in state["workers"])


def _percentiles(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": round(cuts[49], 4), "p99": round(cuts[98], 4), "max": round(max(seconds), 4)}


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--count", type=int, default=200, help="requests")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        live_cluster(["--heartbeat-s", str(HEARTBEAT_S)], Path(folder) / "log") as url,
    ):
        found = measure(url, arguments.count, arguments.seed)
    print(json.dumps(found, indent=2))
    write_record(arguments.json, {**found, "environment": environment()})


if __name__ == "__main__":
    main()
