"""What does one bad thing after another to a cluster."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence

from ..handoff.packet_network import PacketNetwork, Weather
from .chaos_beside import BigClient, SmallDisk
from .chaos_clocks import Clocks
from .chaos_cluster import HOST_OF, ChaosCluster, read_state
from .chaos_recovery import Fault

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
