"""Mixed requests against a whole cluster with tenants on: is every token metered that a client saw, and is
everything free afterwards?

    python -m splitserve.bench.handoff.mixed [--requests 10000] [--json bench/results/mixed.json]

Streamed and whole, chats and completions, several choices, grammars, tools, scores, batches; clients that
leave in mid-stream or before it, wrong keys, nonsense, limits. Each answer's usage is compared with its
record in the usage database, their sums with /metrics, all blocks of all workers must be free or cached at
the end, and memory flat. Whatever is not so is a failure, and the command ends with status 1.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import aiohttp
import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from ...coordinator.tenants.settings import SQLITE
from ...coordinator.tenants.usage_record import FIELDS, UsageRecord
from ..environment import environment, option_parser, write_record
from ..operator_auth import OperatorAuth
from .mixed_clients import MixedClients, RequestFailed, Seen
from .mixed_cluster import Place, cluster

CONCURRENCY = 32
SETTLE_S = 30.0
OPERATOR = OperatorAuth()
MAX_TOLD = 20
MAX_GROWTH = 1.1  # from a quarter of the requests to the end, of all processes' private memory together
METRICS = {
    "prompt_tokens": "splitserve_prompt_tokens_total",
    "cached_tokens": "splitserve_prompt_tokens_cached_total",
    "completion_tokens": "splitserve_generation_tokens_total",
}


def main() -> int:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster ends, too
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as (place, processes, log):
        memory: dict[str, float] = {}

        def sample(num_done: int) -> None:
            for name, at in (("quarter", options.requests // 4), ("end", options.requests)):
                if num_done >= at and name not in memory:
                    memory[name] = round(sum(_private_bytes(process) for process in processes) / 1e6, 1)

        begin = time.monotonic()
        result = asyncio.run(mix(place, options.requests, options.seed, sample))
        result["seconds"] = round(time.monotonic() - begin, 1)
        sample(options.requests)
        if memory["end"] > memory["quarter"] * MAX_GROWTH:
            result["failures"].append(f"memory grew from {memory['quarter']} to {memory['end']} MB")
        result["failures"] += [
            line for line in log.read_text().splitlines() if " ERROR " in line or "Traceback" in line
        ][:20]
    results = {"environment": environment(), "seed": options.seed, "memory_mb": memory, **result}
    print(json.dumps(results, indent=1))
    write_record(options.json, results)
    return 1 if results["failures"] else 0


def _private_bytes(process: psutil.Process) -> int:
    """Without what is shared: the pools of KV blocks, whose pages count for each process that has touched
    them."""
    info = process.memory_info()
    return int(info.rss - info.shared)


async def mix(
    place: Place, num_requests: int, seed: int, sample: Any = lambda num_done: None
) -> dict[str, Any]:
    """Send all requests, a tenth of them in batches, and list what does not agree in ``failures``."""
    await _at_rest(place)  # what others asked for before is metered, too
    before = Sums.now(place)
    timeout, connector = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(place.url, timeout=timeout, connector=connector) as session:
        clients = MixedClients(session, place.keys, place.model, Random(seed))
        num_batched = num_requests // 10
        batches = [asyncio.create_task(clients.batch(n, 600)) for n in _split(num_batched, 200)]
        seen: list[Seen] = []
        failed: list[str] = []
        left = num_requests - num_batched

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                try:
                    seen.append(await clients.one())
                except RequestFailed as failure:
                    failed.append(str(failure))
                sample(len(seen) + len(failed))

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        for batch in batches:
            seen += await batch
    state, deadline = await _at_rest(place), time.monotonic() + SETTLE_S
    while (
        differences := list(compare(seen, before, after := Sums.now(place)))
    ) and time.monotonic() < deadline:
        await asyncio.sleep(1.0)  # a machine with other work to do may need longer
    failures = [*failed[:MAX_TOLD], *_blocks(state), *differences]
    return {
        "requests": len(seen) + len(failed),
        "kinds": dict(sorted(Counter(s.kind for s in seen).items())),
        "statuses": {str(status): n for status, n in sorted(Counter(s.status for s in seen).items())},
        "compared_one_by_one": sum(s.usage is not None for s in seen),
        "records": len(after.records) - len(before.records),
        "tokens": {name: int(after.metrics[name] - before.metrics[name]) for name in METRICS},
        "failures": failures,
    }


class Sums(NamedTuple):
    """What is metered, and what is counted."""

    records: dict[str, UsageRecord]
    metrics: dict[str, float]

    @classmethod
    def now(cls, place: Place) -> Sums:
        with closing(sqlite3.connect(place.usage.removeprefix(SQLITE))) as database:
            rows = database.execute(f"SELECT {', '.join(FIELDS)} FROM usage")
            records = {row[0]: UsageRecord(*row) for row in rows}
        metrics: defaultdict[str, float] = defaultdict(float)
        for url in place.metrics:
            for family in text_string_to_metric_families(
                httpx.get(f"{url}/metrics", timeout=20, auth=OPERATOR).text
            ):
                for item in family.samples:
                    for name, metric in METRICS.items():
                        metrics[name] += item.value if item.name == metric else 0
                    if item.name == "splitserve_requests_total":
                        metrics[f"status {item.labels['status']}"] += item.value
        return cls(records, dict(metrics))


def compare(seen: Sequence[Seen], before: Sums, after: Sums) -> Iterator[str]:
    """Sentences about what does not agree."""
    new = {id: record for id, record in after.records.items() if id not in before.records}
    expected = {
        "wrong key": {401},
        "nonsense": {400, 404},
        "over limits": {200, 429},
        "leaves before": {0, 200},
    }
    for one in seen:
        if one.status not in expected.get(one.kind, {200}):
            yield f"{one.kind}: status {one.status}"
        record = new.get(one.id)
        if one.id and record is None and one.status == 200:  # a refused request has an id too, and no record
            yield f"{one.kind}: {one.id} is not metered"
        if record is None:
            continue
        metered = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
        if record.tenant != one.tenant or (
            one.usage is not None and (record.status, metered) != ("200", one.usage)
        ):
            yield f"{one.kind}: {one} is metered as {record}"
        elif record.completion_tokens < one.num_tokens:
            yield f"{one.kind}: {one.num_tokens} tokens came, {record.completion_tokens} are metered"
    unseen = len(set(new) - {one.id for one in seen})
    left_early = sum(one.kind.startswith("leaves") and not one.id for one in seen)
    if unseen > left_early:
        yield (
            f"{unseen} requests are metered of which no client knows the id; {left_early} left before "
            "they could"
        )
    for name in METRICS:
        metered_sum, counted = (
            sum(getattr(r, name) for r in new.values()),
            after.metrics[name] - before.metrics[name],
        )
        if metered_sum != counted:
            yield f"{name}: {metered_sum} metered, {counted:g} in /metrics"
    for status in ("200", "cancelled"):
        metered_sum = sum(record.status == status for record in new.values())
        counted = after.metrics.get(f"status {status}", 0) - before.metrics.get(f"status {status}", 0)
        if metered_sum != counted:
            yield f"status {status}: {metered_sum} requests metered, {counted:g} in /metrics"


async def _at_rest(place: Place) -> dict[str, Any]:
    """The state of the first process once nothing runs and all is metered; as it is after SETTLE_S."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        states = [httpx.get(f"{url}/debug/state", timeout=20, auth=OPERATOR).json() for url in place.metrics]
        if all(_is_idle(state) for state in states) or time.monotonic() > deadline:
            await asyncio.sleep(1.5)  # the meter writes every half second, workers report every quarter
            state: dict[str, Any] = states[0]
            return state
        await asyncio.sleep(0.1)


def _is_idle(state: dict[str, Any]) -> bool:
    return not any(state["requests"].values()) and not any(
        w["blocks"]["used"] or w["held"] for w in state["workers"]
    )


def _blocks(state: dict[str, Any]) -> Iterator[str]:
    for worker in state["workers"]:
        blocks = worker["blocks"]
        if worker["held"] or blocks["used"] or blocks["free"] + blocks["cached"] != blocks["total"]:
            yield f"{worker['worker_id']} holds {worker['held']} requests, blocks: {blocks}"


def _split(total: int, most: int) -> list[int]:
    return [min(most, total - begin) for begin in range(0, total, most)]


if __name__ == "__main__":
    sys.exit(main())
