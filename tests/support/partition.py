"""A prefill worker is cut off from one of two decode workers, while the coordinator sees all three. Run by
test_partition.py as a program: it starts itself again in a network namespace of its own.

    python -m support.partition FOLDER        prints what it saw as JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from splitserve.bench.chaos.chaos_cluster import ChaosCluster, read_state
from splitserve.bench.chaos.chaos_streams import Clients, questions
from splitserve.bench.handoff.packet_network import PacketNetwork, Weather, enter

HOST_OF = {"coordinator": 0, "prefill-0": 1, "decode-0": 2, "decode-1": 1}
NUM_STREAMS = 8
HEALS_WITHIN_S = 60.0


class Scene:
    """The cluster, its network, and what is asked of it: answers, each known from before the cut."""

    def __init__(self, network: PacketNetwork, folder: Path) -> None:
        self._network, self._cluster = network, ChaosCluster(network, folder, HOST_OF)
        self._bodies = [body | {"max_tokens": 200} for body in questions(NUM_STREAMS, seed=7)]
        self.seen: dict[str, Any] = {}

    async def run(self) -> None:
        await self._cluster.run(self._play)

    async def _play(self) -> None:
        undisturbed = await self._answers()
        under_way = asyncio.create_task(self._answers())
        while not self._dispatches(await self._state(), "decode-0"):
            await asyncio.sleep(0.005)
        self._network.set(Weather(cut=(2,)))
        cut_at, before = time.monotonic(), await self._state()
        during = await self._answers()
        self.seen["right"] = during == await under_way == undisturbed
        self.seen["seconds"] = time.monotonic() - cut_at
        state = await self._state()
        self.seen["redispatches"] = state["counters"]["redispatches"] - before["counters"]["redispatches"]
        self.seen["alive"] = sorted(w["worker_id"] for w in state["workers"])
        self._network.set(Weather())
        self.seen["healed"] = await self._healed(undisturbed)

    async def _healed(self, undisturbed: list[Any]) -> bool:
        """Whether prompts go to the decode worker again, nothing has to be tried twice, and no block is left
        over."""
        deadline, state = time.monotonic() + HEALS_WITHIN_S, await self._state()
        while time.monotonic() < deadline:
            before, used = (await self._state())["counters"]["redispatches"], False
            round_ = asyncio.create_task(self._answers())
            while not round_.done():
                used = used or self._dispatches(state := await self._state(), "decode-0") > 0
                await asyncio.sleep(0.01)
            state = await self._state()
            if await round_ == undisturbed and used and state["counters"]["redispatches"] == before:
                break
        while any(w["blocks"]["used"] for w in state["workers"]) and time.monotonic() < deadline:
            state = await self._state()
        return time.monotonic() < deadline

    async def _answers(self) -> list[Any]:
        clients = Clients(self._cluster.url, self._bodies, len(self._bodies))
        await clients.run(asyncio.Event(), len(self._bodies))
        await clients.close()
        return [s.error or s.answer for s in sorted(clients.ended, key=lambda s: s.question)]

    async def _state(self) -> dict[str, Any]:
        return await read_state(self._cluster.url)

    @staticmethod
    def _dispatches(state: dict[str, Any], worker_id: str) -> int:
        return sum(len(w["dispatches"]) for w in state["workers"] if w["worker_id"] == worker_id)


def main() -> None:
    enter()
    network = PacketNetwork(2, seed=1)
    try:
        scene = Scene(network, Path(sys.argv[1]))
        asyncio.run(scene.run())
        print(json.dumps(scene.seen))
    finally:
        network.close()


if __name__ == "__main__":
    main()
