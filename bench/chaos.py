"""Processes on two hosts under kill -9, SIGSTOP, SIGTERM, lost, delayed and cut-off packets and corrupt KV blocks, while clients stream.

    python -m splitserve.bench.chaos --minutes 10 --json bench/results/chaos.json
    python -m splitserve.bench.chaos --minutes 0.5 --streams 8        # a short one

The hosts are network namespaces on this machine, joined by a process that forwards every packet (see packet_network.py); where there can
be none, the program says so and leaves out what happens to packets. Every stream's text is compared with the answer of the same
cluster before the faults began. At the end no worker may hold a block that nobody owns. Exit status 0: nothing was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import packet_network
from .chaos_cluster import HOST_OF, ChaosCluster, read_state
from .chaos_recovery import Fault, RecoveryWatch
from .chaos_streams import Answer, Clients, questions, with_stop_strings
from .chaos_verdict import judge, verdict
from .environment import environment
from .packet_network import PacketNetwork, Weather

NUM_QUESTIONS = 48
REST_S = 60.0
FAULTS = ("kill", "kill", "stop", "leave", "loss", "delay", "cut", "corrupt")
WITHOUT_NETWORK = ("kill", "stop", "leave")


class Adversary:
    """Does one bad thing after another, each over before long."""

    def __init__(self, cluster: ChaosCluster, network: PacketNetwork | None, seed: int, faults: Sequence[str]) -> None:
        self._cluster, self._network = cluster, network
        self._faults = [f for f in faults if network is not None or f in WITHOUT_NETWORK]
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[Fault] = []
        self.packets: dict[str, int] = {}

    async def run(self, until: float) -> None:
        while time.monotonic() < until:
            fault = self._random.choice(self._faults)
            await getattr(self, f"_{fault}")()
            await self._sleep(1.0, 6.0)
        self._weather(Weather())

    async def _kill(self) -> None:
        if (name := await self._victim()) is None:
            return
        self._note("kill", name)
        self._cluster.signal(name, signal.SIGKILL)

    async def _stop(self) -> None:
        if (name := await self._victim()) is None:
            return
        self._note("stop", name)
        self._cluster.signal(name, signal.SIGSTOP)
        await self._sleep(0.3, 6.0)
        self._cluster.signal(name, signal.SIGCONT)

    async def _leave(self) -> None:
        """It drains."""
        if (name := await self._victim()) is not None:
            self._note("leave", name)
            self._cluster.signal(name, signal.SIGTERM)

    async def _loss(self) -> None:
        await self._storm(Weather(loss=self._random.uniform(0.02, 0.2)))

    async def _delay(self) -> None:
        delay_s = self._random.uniform(0.01, 0.2)
        await self._storm(Weather(delay_s=delay_s, jitter_s=delay_s / 2))

    async def _cut(self) -> None:
        await self._storm(Weather(cut=(2,)))

    async def _corrupt(self) -> None:
        await self._storm(Weather(corrupt=0.3))

    async def _storm(self, weather: Weather) -> None:
        kind = next(name for name, value in vars(weather).items() if value)
        self._note(kind, *(w for w in self._cluster.workers if kind != "cut" or HOST_OF[w] in weather.cut))
        self._weather(weather)
        await self._sleep(0.5, 4.0)
        self._weather(Weather())

    def _note(self, kind: str, *workers: str) -> None:
        self.counts[kind] += 1
        self.faults.append(Fault(kind, workers, time.monotonic()))

    def _weather(self, weather: Weather) -> None:
        if self._network is not None:
            self.packets = self._network.set(weather)

    async def _sleep(self, least: float, most: float) -> None:
        await asyncio.sleep(self._random.uniform(least, most))

    async def _victim(self) -> str | None:
        """A worker that is here, beside another one of its role: starting one again takes this machine a while."""
        here = [w["worker_id"] for w in (await read_state(self._cluster.url))["workers"] if not w["draining"]]
        spare = [name for name in here if sum(other.partition("-")[0] == name.partition("-")[0] for other in here) > 1]
        return self._random.choice(spare) if spare else None


async def leaked_blocks(url: str) -> dict[str, int]:
    """Blocks that are still used, by worker, once nothing has run for a while."""
    deadline = time.monotonic() + REST_S
    while True:
        state = await read_state(url)
        used = {w["worker_id"]: w["blocks"]["used"] for w in state["workers"] if w["blocks"]["used"]}
        idle = state["requests"] == {"queued": 0, "running": 0}
        if (idle and not used) or time.monotonic() > deadline:
            return used
        await asyncio.sleep(0.25)


async def fault_free(cluster: ChaosCluster, bodies: list[dict[str, Any]], concurrency: int) -> dict[int, Answer]:
    """Every question's answer while nothing is wrong."""
    clients = Clients(cluster.url, bodies, concurrency)
    await clients.run(asyncio.Event(), len(bodies))
    await clients.close()
    failed = [s.error for s in clients.ended if s.error]
    if failed:
        raise RuntimeError(f"without any fault: {failed[0]}")
    return {s.question: s.answer for s in clients.ended}


async def run(arguments: argparse.Namespace, network: PacketNetwork | None, folder: Path) -> dict[str, Any]:
    """The whole run; what it found."""
    cluster = ChaosCluster(network, folder)
    found: dict[str, Any] = {}

    async def work() -> None:
        found.update(await hurt(cluster, network, arguments))

    await cluster.run(work)
    return found


async def hurt(cluster: ChaosCluster, network: PacketNetwork | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Faults and streams at the same time, then rest; what was lost, wrong or leaked."""
    bodies = questions(NUM_QUESTIONS, arguments.seed)
    bodies, expected = with_stop_strings(bodies, await fault_free(cluster, bodies, arguments.streams))
    clients, stop = Clients(cluster.url, bodies, arguments.streams), asyncio.Event()
    adversary = Adversary(cluster, network, arguments.seed, arguments.faults)
    watch = RecoveryWatch(cluster.url)
    streaming, watching = asyncio.create_task(clients.run(stop)), asyncio.create_task(watch.run())
    await adversary.run(time.monotonic() + arguments.minutes * 60)
    stop.set()
    await streaming
    await clients.close()
    leaked = await leaked_blocks(cluster.url)
    state = await read_state(cluster.url)
    watch.take(state)
    watching.cancel()
    return {
        **judge(clients.ended, expected),
        "refused_and_sent_again": clients.counts["refused"],
        "faults": dict(adversary.counts),
        "packets": adversary.packets,
        "recovery": watch.report(adversary.faults, clients.ended),
        "blocks_leaked": leaked,
        "restarts": cluster.restarts,
        "counters": total_counters(state),
    }


def total_counters(state: dict[str, Any]) -> dict[str, float]:
    """The coordinator's counters, and the corrupt blocks that the decode workers (since their last start) have refused."""
    corrupt = sum(w["counters"].get("corrupt_blocks", 0) for w in state["workers"])
    return {**state["counters"], "corrupt_blocks_refused_by_living_workers": corrupt}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=32, help="streams at any time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", nargs="+", choices=sorted({*FAULTS}), default=FAULTS, help="only these kinds; default: all")
    parser.add_argument("--logs", type=Path, help="folder for the processes' logs; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    why_not = packet_network.missing() if packet_network.INSIDE not in os.environ else ""
    if why_not:
        print(f"no network between hosts: {why_not}; what happens to packets is left out", file=sys.stderr)
    else:
        packet_network.enter()
    network = None if why_not else PacketNetwork(2, arguments.seed)
    with tempfile.TemporaryDirectory(prefix="splitserve-chaos-") as temporary:
        folder = arguments.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = asyncio.run(run(arguments, network, folder))
        finally:
            if network is not None:
                network.close()
    result = {
        **found,
        "minutes": arguments.minutes,
        "concurrency": arguments.streams,
        "hosts": 2 if network else 1,
        "environment": environment(),
    }
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(verdict(found), file=sys.stderr)
    return int(bool(found["streams_lost"] or found["streams_wrong"] or found["blocks_leaked"]))


if __name__ == "__main__":
    sys.exit(main())
