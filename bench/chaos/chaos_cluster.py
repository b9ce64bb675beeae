"""The cluster that a chaos run hurts: a coordinator and workers on hosts of their own, under the supervisor
of ``splitserve up``."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from ...cli.cluster_state import is_ready
from ...cli.main import ENTRY
from ...cli.settings import DEMO_MODEL, DEMO_MODEL_NAME
from ...cli.up import free_port
from ...deploy.child_process import Command, Started, start_anew
from ...deploy.supervisor import Supervisor
from ...deploy.worker_forks import WorkerForks
from ...transport.channels.keys import generate_key
from ..handoff import packet_network
from ..handoff.packet_network import PacketNetwork
from ..live_cluster import PROGRAM, words
from ..operator_auth import OperatorAuth, operator_headers
from .chaos_clocks import Clocks

HTTP_PORT, CONTROL_PORT = 8000, 7700
HOST_OF = {"coordinator": 1, "prefill-0": 1, "decode-0": 1, "prefill-1": 2, "decode-1": 2}
START_S = 120.0


class ChaosCluster:
    """A coordinator and workers, each on its host; what dies is started again."""

    def __init__(
        self,
        network: PacketNetwork | None,
        folder: Path,
        host_of: Mapping[str, int] = HOST_OF,
        clocks: Clocks | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """``host_of``: the processes, each with its host; a worker's name begins with its role. ``options``:
        more of the coordinator's."""
        self._network, self._folder, self.host_of = network, folder, host_of
        self._clocks, self._options = clocks, options
        self.workers = [name for name in host_of if name != "coordinator"]
        generate_key(folder / "key")
        self._common = {"model": DEMO_MODEL, "key_file": folder / "key"}
        ports = (HTTP_PORT, CONTROL_PORT) if network else (free_port("127.0.0.1"), free_port("127.0.0.1"))
        self.url = f"http://{self._address('coordinator')}:{ports[0]}"
        self._control = f"tcp://{self._address('coordinator')}:{ports[1]}"
        self._http_port = ports[0]
        os.environ |= self._clock_of("")  # the fork server's
        self._forks = WorkerForks(ENTRY, lambda sentence: self._log("up", sentence))
        self._environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._num_starts = 0
        self._supervisor = Supervisor(
            [self._coordinator(), *map(self._worker, self.workers)],
            is_ready=self._is_whole,
            log=self._log,
            ready_timeout_s=START_S,
            known_workers=self._known_workers,
        )

    @property
    def restarts(self) -> int:
        return self._num_starts - len(self.workers)

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Does the work once all are here and ready; then ends all. Raises RuntimeError where something
        cannot start."""

        async def worked() -> int:
            await work()
            return 0

        try:
            if await self._supervisor.run(worked):
                raise RuntimeError(f"{self._supervisor.failure}: see {self._folder}")
        finally:
            self._forks.close()

    def kill_fork_server(self) -> bool:
        """Whether there was one: it is started again with the next worker."""
        workers = {child.pid for child in self._supervisor.children}
        ours = [
            child
            for child in psutil.Process().children()
            if child.pid not in workers and _is_fork_server(child)
        ]
        for server in ours:
            server.kill()
        return bool(ours)

    def signal(self, name: str, number: int) -> None:
        next(child for child in self._supervisor.children if child.command.name == name).signal(number)

    async def _is_whole(self) -> bool:
        return await is_ready(self.url) and len(await self._known_workers() or ()) == len(self.workers)

    async def _known_workers(self) -> dict[str, int] | None:
        """Return the process ids of the coordinator's workers; None: it does not answer."""
        try:
            async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
                answer = await client.get(f"{self.url}/debug/state", headers=operator_headers(self.url))
        except httpx.HTTPError:
            return None
        workers = answer.json()["workers"] if answer.status_code == 200 else []
        return {worker["process"] or worker["worker_id"]: worker["pid"] for worker in workers} or None

    def _log(self, name: str, line: str) -> None:
        with (self._folder / f"{name}.log").open("a", encoding="utf-8") as log:
            print(line, file=log)

    def _address(self, name: str) -> str:
        return packet_network.address(self.host_of[name]) if self._network else "127.0.0.1"

    def _coordinator(self) -> Command:
        prefix = self._network.prefix(self.host_of["coordinator"]) if self._network else []
        options = words(
            **self._common,
            open_access=True,
            host=self._address("coordinator"),
            port=self._http_port,
            control_address=self._control,
            served_model_name=DEMO_MODEL_NAME,
        )
        argv = [*prefix, *PROGRAM, "coordinator", *options, *self._options]
        return Command("coordinator", argv, self._environ | self._clock_of("coordinator"), start_anew)

    def _worker(self, name: str) -> Command:
        role, address = name.partition("-")[0], self._address(name)
        options = {"name": name, "coordinator": self._control, "dtype": "float32", "kv_cache_gib": 0.08}
        options |= {
            "plaintext_kv": True,
            "exact": True,
        }  # a changed byte is to reach the checksum, not the cipher
        if role == "decode":
            listen = f"tcp://{address}:*"
            options |= {"listen": listen, "data_listen": listen, "advertise_host": address}
        return Command(name, [role, *words(**self._common, **options)], self._environ, self._fork)

    def _clock_of(self, name: str) -> dict[str, str]:
        return self._clocks.environ(name) if self._clocks is not None else {}

    async def _fork(self, command: Command, output: int) -> Started:
        self._num_starts += 1
        first = [self._network.entering(self.host_of[command.name])] if self._network else []
        first += [self._clocks.own(command.name)] if self._clocks else []
        return await self._forks.start(command, output, partial(_call, first))


def _call(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


async def read_state(url: str) -> dict[str, Any]:
    """/debug/state."""
    async with httpx.AsyncClient(timeout=30, trust_env=False, verify=False, auth=OperatorAuth()) as client:
        state: dict[str, Any] = (await client.get(f"{url}/debug/state")).json()
        return state


def _is_fork_server(process: psutil.Process) -> bool:
    try:
        return "multiprocessing.forkserver" in str(process.cmdline())
    except psutil.Error:  # it has ended, or is about to be reaped
        return False
