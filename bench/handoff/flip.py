"""How long a worker takes to change its role in place: real processes, under load.

    python -m splitserve.bench.handoff.flip [--model DIR] [--flips 20] [--json bench/results/flip.json]

`splitserve up --flexible` with one prefill and two decode workers and a few streams always open; one worker
at a time becomes a prefill worker and then a decode worker again. Seconds after the order until the process
has sent Hello in its new role (began), until a first token came from it or a sequence joined it (worked: the
first useful work), and until nothing of its old role was left (ended; it lingers for a second).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from ...cli.settings import DEMO_MODEL
from ..environment import environment, option_parser, write_record
from ..live_cluster import live_cluster, words
from ..operator_auth import OperatorAuth

PATIENCE_S = 240.0
STREAMS, TOKENS = 8, 24


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument(
        "--model", type=Path, default=DEMO_MODEL, help="checkpoint folder; default: the bundled one"
    )
    parser.add_argument("--flips", type=int, default=20, help="half of them each way")
    options = parser.parse_args()
    machine = environment()
    found = asyncio.run(measure(options.model, options.flips))
    print(json.dumps(found["seconds"], indent=1))
    write_record(options.json, {"environment": machine, "model": options.model.name, **found})


async def measure(model: Path, num_flips: int) -> dict[str, Any]:
    """Starts the cluster, flips, stops it."""
    options = words(model=model, flexible=True, prefill=1, decode=2, kv_cache_gib=0.25)
    with (
        tempfile.TemporaryDirectory(prefix="splitserve-flip-") as folder,
        live_cluster(options, Path(folder) / "log") as url,
    ):
        async with httpx.AsyncClient(
            base_url=url, timeout=PATIENCE_S, trust_env=False, auth=OperatorAuth()
        ) as http:
            await _until("the cluster is ready", _whole, http)
            clients = [asyncio.create_task(_load(http, i)) for i in range(STREAMS)]
            try:
                records = [await flip(http, i) for i in range(num_flips)]
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)
    return {"streams": STREAMS, "seconds": summary(records), "flips": records}


async def flip(http: httpx.AsyncClient, number: int) -> dict[str, Any]:
    """The first decode worker becomes a prefill worker, or the newest prefill worker a decode worker."""
    role, old = ("prefill", "decode") if number % 2 == 0 else ("decode", "prefill")
    workers = [
        w
        for w in (await http.get("/debug/state")).json()["workers"]
        if w["role"] == old and not w["draining"]
    ]
    name = sorted(workers, key=lambda w: int(w["incarnation"]))[0 if old == "decode" else -1]["process"]
    answer = await http.post(f"/admin/flip/{name}", params={"to": role})
    if answer.status_code != 202:
        raise SystemExit(f"{name} did not become a {role} worker: {answer.text}")

    def over(state: dict[str, Any] | None) -> bool:
        return state is not None and all(
            state["flips"][-1][key] is not None for key in ("began_s", "worked_s", "ended_s")
        )

    state = await _until(f"{name} is a {role} worker", over, http)
    record: dict[str, Any] = state["flips"][-1]
    return {key: record[key] for key in ("role", "began_s", "worked_s", "ended_s")}


def _whole(state: dict[str, Any] | None) -> bool:
    return state is not None and state["coordinator"]["ready"] and len(state["workers"]) == 3


async def _load(http: httpx.AsyncClient, client: int) -> None:
    """One request after the other."""
    number = 0
    while True:
        number += 1
        body = {
            "prompt": f"client {client} request {number}: what does os.path.join do?",
            "max_tokens": TOKENS,
            "ignore_eos": True,
        }
        (await http.post("/v1/completions", json=body)).raise_for_status()


async def _until(
    what: str, condition: Callable[[dict[str, Any] | None], bool], http: httpx.AsyncClient
) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            state: dict[str, Any] | None = (await http.get("/debug/state")).json()
        except httpx.TransportError:
            state = None
        if condition(state):
            assert state is not None, "the condition asked for it"
            return state
        await asyncio.sleep(0.02)
    raise SystemExit(f"not within {PATIENCE_S:g} s: {what}")


def summary(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and worst, by new role and by event."""
    return {
        f"to {role}, {key.removesuffix('_s')}": {"median": statistics.median(times), "worst": max(times)}
        for role in ("prefill", "decode")
        for key in ("began_s", "worked_s", "ended_s")
        if (times := [record[key] for record in records if record["role"] == role])
    }


if __name__ == "__main__":
    main()
