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
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..environment import environment, option_parser, write_record
from ..handoff import packet_network
from ..handoff.packet_network import PacketNetwork
from . import chaos_clocks
from .adversary import Adversary
from .chaos_beside import BatchClient, SmallDisk, small_disk
from .chaos_clocks import Clocks
from .chaos_cluster import HOST_OF, ChaosCluster, read_state
from .chaos_recovery import RecoveryWatch
from .chaos_streams import Answer, Clients, questions, with_stop_strings
from .chaos_verdict import BAD, judge, verdict

NUM_QUESTIONS = 48
REST_S = 60.0
FAULTS = ("kill", "kill", "stop", "leave", "loss", "delay", "cut", "corrupt", "clock", "disk", "forks", "big")


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
    parser = option_parser(__doc__, to_json=True)
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
    write_record(arguments.json, result)
    print(verdict(found), file=sys.stderr)
    return int(any(found.get(bad) for bad in BAD))


if __name__ == "__main__":
    sys.exit(main())
