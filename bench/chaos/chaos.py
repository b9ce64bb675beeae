"""Processes on two hosts under kill -9, SIGSTOP, SIGTERM, lost, delayed and cut-off packets, corrupt KV
blocks, clocks that jump by seconds, hours and years, a full disk, a killed fork server and bodies of 16 MiB,
while clients stream.

    python -m splitserve.bench.chaos.chaos --minutes 10 --json bench/results/chaos.json
    python -m splitserve.bench.chaos.chaos --minutes 0.5 --streams 8        # a short one

The hosts are network namespaces on this machine, joined by a process that forwards every packet (see
packet_network.py); without namespaces the program reports it and leaves out the faults of packets. Clocks
need a C compiler (Debian: apt-get install gcc), the disk the right to mount one, which the namespaces give;
without them these faults are left out, with a message.

Every stream's text is compared with the answer of the same cluster before the faults began. At the end no
worker may hold a block without an owner, every stream and each request of a batch must be metered once, and
every batch answered. Exit status 0: nothing was lost.
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

from ..environment import environment
from ..handoff import packet_network
from ..handoff.packet_network import PacketNetwork, Weather
from . import chaos_clocks
from .chaos_beside import BatchClient, BigClient, SmallDisk, small_disk
from .chaos_clocks import Clocks
from .chaos_cluster import HOST_OF, ChaosCluster, read_state
from .chaos_recovery import Fault, RecoveryWatch
from .chaos_streams import Answer, Clients, questions, with_stop_strings
from .chaos_verdict import BAD, judge, verdict

NUM_QUESTIONS = 48
REST_S = 60.0
FAULTS = ("kill", "kill", "stop", "leave", "loss", "delay", "cut", "corrupt", "clock", "disk", "forks", "big")
NETWORK_FAULTS = ("loss", "delay", "cut", "corrupt")


class Adversary:
    """Does one bad thing after another, each over before long."""

    def __init__(
        self,
        cluster: ChaosCluster,
        network: PacketNetwork | None,
        clocks: Clocks | None,
        disk: SmallDisk | None,
        seed: int,
        faults: Sequence[str],
    ) -> None:
        self._cluster, self._network, self._clocks, self._small_disk = cluster, network, clocks, disk
        without = {
            *(NETWORK_FAULTS if network is None else ()),
            *(() if clocks else ("clock",)),
            *(() if disk else ("disk",)),
        }
        self._faults = [fault for fault in faults if fault not in without]
        self._big_client = BigClient(cluster.url)
        self._sending: set[asyncio.Task[None]] = set()
        self.jumps: Counter[str] = Counter()
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
        await asyncio.gather(*self._sending)
        await self._big_client.close()

    @property
    def big_bodies(self) -> dict[str, int]:
        """Answers to them, by status."""
        return dict(self._big_client.counts)

    async def _clock(self) -> None:
        """A host's clocks, or one process's, are set, and stay."""
        assert self._clocks is not None
        host = self._random.choice((1, 2))
        of_host = [name for name, its in self._cluster.host_of.items() if its == host]
        names = of_host if self._random.random() < 0.5 else [self._random.choice(of_host)]
        offset = self._clocks.jump(names, self._random)
        self.jumps[f"{offset:+d} s"] += 1
        self._note("clock", *names)

    async def _disk(self) -> None:
        assert self._small_disk is not None
        self._note("disk")
        self._small_disk.fill()
        await self._sleep(1.0, 8.0)
        self._small_disk.free()

    async def _forks(self) -> None:
        if self._cluster.kill_fork_server():
            self._note("forks")

    async def _big(self) -> None:
        """Other faults may come while they are read."""
        self._note("big")
        self._sending.add(task := asyncio.create_task(self._big_client.send()))
        task.add_done_callback(self._sending.discard)

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
        """A worker that is here, beside another one of its role: starting one again takes this machine a
        while."""
        here = [w["worker_id"] for w in (await read_state(self._cluster.url))["workers"] if not w["draining"]]
        spare = [
            name
            for name in here
            if sum(other.partition("-")[0] == name.partition("-")[0] for other in here) > 1
        ]
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


async def fault_free(
    cluster: ChaosCluster, bodies: list[dict[str, Any]], concurrency: int
) -> dict[int, Answer]:
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
    found: dict[str, Any] = {}
    why_not = chaos_clocks.missing()
    clocks = None if why_not else Clocks(folder / "clocks", HOST_OF)
    if why_not:
        print(f"no clocks that jump: {why_not}", file=sys.stderr)
    with small_disk(folder / "disk") as disk:
        if disk is None:
            print(
                "no disk can be mounted here: a full one is left out, and batches and usage with it",
                file=sys.stderr,
            )
        cluster = ChaosCluster(
            network, folder, clocks=clocks, options=disk.options if disk is not None else ()
        )

        async def work() -> None:
            found.update(await hurt(cluster, network, clocks, disk, arguments))

        await cluster.run(work)
        if disk is not None:  # the coordinator has written all that it had
            metered = disk.metered()
            found["not_metered_once"] = sum(metered[id] != 1 for id in found.pop("request_ids"))
    return found


async def hurt(
    cluster: ChaosCluster,
    network: PacketNetwork | None,
    clocks: Clocks | None,
    disk: SmallDisk | None,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Faults and streams at the same time, then rest; what was lost, wrong or leaked."""
    bodies = questions(NUM_QUESTIONS, arguments.seed)
    bodies, expected = with_stop_strings(bodies, await fault_free(cluster, bodies, arguments.streams))
    clients, stop = Clients(cluster.url, bodies, arguments.streams), asyncio.Event()
    adversary = Adversary(cluster, network, clocks, disk, arguments.seed, arguments.faults)
    batches = BatchClient(cluster.url)
    watch = RecoveryWatch(cluster.url)
    streaming, watching = asyncio.create_task(clients.run(stop)), asyncio.create_task(watch.run())
    batching = asyncio.create_task(batches.run(stop)) if disk is not None else None
    await adversary.run(time.monotonic() + arguments.minutes * 60)
    stop.set()
    await streaming
    if batching is not None:
        await batching
    await clients.close()
    leaked = await leaked_blocks(cluster.url)
    state = await read_state(cluster.url)
    watch.take(state)
    watching.cancel()
    return {
        **judge(clients.ended, expected),
        "refused_and_sent_again": clients.counts["refused"],
        "faults": dict(adversary.counts),
        "clock_jumps": dict(adversary.jumps),
        "big_bodies": adversary.big_bodies,
        "batches": dict(batches.counts),
        "batches_wrong": batches.wrong,
        "request_ids": [stream.request_id for stream in clients.ended],
        "packets": adversary.packets,
        "recovery": watch.report(adversary.faults, clients.ended),
        "blocks_leaked": leaked,
        "restarts": cluster.restarts,
        "counters": total_counters(state),
    }


def total_counters(state: dict[str, Any]) -> dict[str, float]:
    """The coordinator's counters, and the corrupt blocks that the decode workers (since their last start)
    have refused."""
    corrupt = sum(w["counters"].get("corrupt_blocks", 0) for w in state["workers"])
    return {**state["counters"], "corrupt_blocks_refused_by_living_workers": corrupt}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=32, help="streams at any time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=sorted({*FAULTS}),
        default=FAULTS,
        help="only these kinds; default: all",
    )
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
    return int(any(found.get(bad) for bad in BAD))


if __name__ == "__main__":
    sys.exit(main())
