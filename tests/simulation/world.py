"""The worker as it ships, and the coordinator's core, under virtual time, with a
seeded adversary between them.

Nothing that decides is written again here. To be read in this order:

    scenario.py, load.py     which faults, which cluster, how much work
    clock.py, process.py, host.py     events; processes that die, freeze and have clocks of their own;
                             hosts whose clocks jump
    builds.py                processes of other wire versions
    network.py, movers.py, agents.py, copies.py, communicators.py      carry messages and KV blocks, badly
    channels.py, environment.py      the four protocols of transport/environment.py over these
    model.py, memory.py, states.py      a model whose tokens show every wrong slot, and the oracle
    worker_process.py, worker_role.py      the worker's live loop, and each of its roles as the world sees it
    step_device.py, drafter.py      what computes its steps, and drafts
    adapters.py              the folder of adapters, and the slots of a process
    coordinator_process.py, coordinator_environment.py      the coordinator, and what its dispatcher is given
    adversary.py, poison.py  what befalls processes
    clients.py, watched_blocks.py, checks.py      what must be true
    campaign.py              many worlds, and what they found
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import cast

from simulation.adapters import AdapterFolder
from simulation.adversary import Adversary
from simulation.agents import Agent
from simulation.builds import Builds
from simulation.channels import NOTICED_S, VirtualListener, VirtualNetwork
from simulation.checks import Checks
from simulation.clients import Clients
from simulation.clock import EventQueue
from simulation.communicator_ends import CommunicatorEnd
from simulation.coordinator_process import CoordinatorProcess
from simulation.faults import Faults, Scenario
from simulation.host import Host
from simulation.network import Network
from simulation.poison import Poison
from simulation.process import Killed
from simulation.worker_process import Home, Kind, WorkerProcess
from simulation.worker_role import WorkerRole

from splitserve.transport.messages.messages import PeerId


class World:
    """Everything of one seed. ``violations``: the faults found; ``counts``: how often each event happened."""

    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.random = Random(seed)
        self.seed, self.scenario = seed, scenario
        self.calm = False
        self.rest_s = 0.0  # how long everything took to end once the faults had stopped
        self.violations: list[str] = []
        self.traceback = ""  # of an assertion inside a core
        self.counts: Counter[str] = Counter()
        self.contents: dict[bytes, int] = {}  # checksums by block hash
        self.stored: dict[bytes, list[int]] = {}  # in the KV store, by block hash
        self.given_back: set[tuple[int, int]] = set()  # dispatches that a worker has reported as failed
        # how often each worker has ended, stood still or been cut off
        self.struck: Counter[PeerId] = Counter()
        self.communicator_ends: dict[int, CommunicatorEnd] = {}  # by number
        self.agents: dict[int, Agent] = {}  # by number
        self.listeners: dict[str, VirtualListener] = {}  # by address
        self.pids: dict[int, WorkerProcess] = {}
        self._number = 0
        self.queue = EventQueue()
        self.hosts = {
            name: Host(self.queue, Random(f"{seed} {name}"))
            for name in (f"host-{i}" for i in range(scenario.cluster.num_hosts))
        }
        self.network = Network(self)
        self.builds = Builds(self)
        self.folder = AdapterFolder(self)
        self.checks = Checks(self)
        self.clients = Clients(self)
        self.poison = Poison(self)
        cluster = scenario.cluster
        self.coordinator_names = ("coordinator", "coordinator-1", "coordinator-2")[: cluster.num_coordinators]
        self.restarted: set[str] = set()  # coordinators that died at some time
        self.coordinators: dict[str, CoordinatorProcess] = {}
        self.workers: dict[str, WorkerRole] = {}  # by name; those of dead processes that have one role, too
        self.processes: dict[str, WorkerProcess] = {}
        for name in self.coordinator_names:
            self._start_coordinator(name)
        for i in range(cluster.num_decode):
            self._begin("decode", i, cluster.decode_blocks)
        for i in range(cluster.num_prefill):
            self._begin("prefill", i, cluster.prefill_blocks)
        for i in range(cluster.num_flexible):
            self._begin("flexible", i, cluster.decode_blocks, "prefill" if i % 2 else "decode")
        for i in range(cluster.num_mixed):
            self._begin("mixed", i, cluster.decode_blocks, "mixed")
        for i in range(cluster.num_far):
            self._begin("decode" if i % 2 else "prefill", i, cluster.decode_blocks, far=True)
        for i in range(cluster.num_borrowing):
            self._begin("borrowing", i, cluster.decode_blocks, "mixed", "decode" if i % 2 else "prefill")
        self.adversary = Adversary(self)

    def next_number(self) -> int:
        """Return the number of a new process, agent or communicator, higher than all before it."""
        self._number += 1
        return self._number

    def violated(self, what: str) -> None:
        self.violations.append(f"{self.queue.now:.3f} s: {what}")

    @property
    def is_merely_poisoned(self) -> bool:
        """Whether poisonous requests are the only faults here."""
        return self.scenario.faults == Faults(poison=self.scenario.faults.poison)

    def strikes(self, chance: float, name: str) -> bool:
        """Whether a fault of this probability happens now."""
        if chance and not self.calm and self.random.random() < chance:
            self.counts[name] += 1
            return True
        return False

    def some_coordinator(self) -> CoordinatorProcess:
        """Any of them, dead or alive."""
        names = self.coordinator_names
        return self.coordinators[names[0] if len(names) == 1 else self.random.choice(names)]

    def coordinators_known_to_a_worker(self) -> list[str]:
        """When it starts: all, or one, which names the others."""
        names = list(self.coordinator_names)
        return names if len(names) == 1 or self.random.random() < 0.5 else [self.random.choice(names)]

    def connected(self, network: VirtualNetwork, address: str) -> bool:
        """Whether a connection to the process that listens there is there."""
        listener = self.listeners.get(address)
        if listener is None or listener.closed or not listener.network.owner.alive:
            return False
        return not (
            listener.network.owner.stands_still(NOTICED_S)
            or self.network.is_cut(network.name, address, NOTICED_S)
        )

    def kill(self, process: WorkerProcess) -> None:
        """With all its roles. It is started again a little later, in the last one. Raises Killed in its own
        turn."""
        if not process.alive:
            return
        self.struck.update(process.role_ids())
        process.die()
        for coordinator in self.coordinators.values():
            coordinator.process_ended(process.pid)
        for other in self.processes.values():
            other.writers.pop(process, None)
        self.queue.after(0.05 + 1.5 * self.random.random() ** 3, self._start_again, process)
        if process.turning:
            raise Killed

    def _begin(
        self,
        name: str,
        number: int,
        num_blocks: int,
        kind: Kind | None = None,
        home: Home = "",
        far: bool = False,
    ) -> None:
        host = f"host-{number % self.scenario.cluster.num_hosts}"
        first = kind or cast(Kind, name)
        WorkerProcess(self, f"{'far-' * far}{name}-{number}", host, num_blocks, first, kind is not None, home)

    def _start_again(self, dead: WorkerProcess) -> None:
        WorkerProcess(self, dead.name, dead.host, dead.num_blocks, dead.latest, dead.flexible, dead.home)

    def restart_coordinator(self, coordinator: CoordinatorProcess, after: float) -> None:
        """It is killed, or ends in good order."""
        if coordinator.awake and coordinator.number % 2:
            coordinator.dispatcher.stop()
            coordinator.sends.look()
        coordinator.die()
        self.restarted.add(coordinator.name)
        self.clients.coordinator_died(coordinator)
        self.queue.after(after, self._start_coordinator, coordinator.name)

    def _start_coordinator(self, name: str) -> None:
        self.coordinators[name] = CoordinatorProcess(self, name)
