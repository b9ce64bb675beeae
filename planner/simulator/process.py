"""A worker's process in a simulation: the live loop (``worker/loop.py``), which turns when something has come
to it."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, Protocol

from ...engine.cache.block_manager import BlockManager
from ...engine.latency_profile import Memory
from ...engine.step.step_progress import LayerProgress
from ...transport.environment import Environment
from ...transport.messages.cache_map import states
from ...transport.messages.fields import incarnations
from ...transport.messages.messages import SECRET_BYTES, ModelIdentity, PeerId, Role
from ...worker.loop import Worker
from ...worker.parts import ModelFacts, RoleParts, WorkerParts, WorkerTimes
from ...worker.settings import DecodeSettings, FlexibleSettings, PrefillSettings
from ...worker.steps import Steps
from .channels import COORDINATOR, Fabric, SimulatedNetwork
from .cluster import Pool
from .device import Device
from .events import EventQueue
from .link import HOST, MOVER, KvBlocks, Link, LinkMover, targets_at

TICK_S = 0.25
"""Between two turns without another cause. Live workers tick every 0.05 s: it matters to deadlines only."""
TICKS_BEGIN = 1024
"""Ticks begin at a multiple of this part of a second, so that the times of all are exact in binary."""


class Surroundings(Protocol):
    """The simulation, as its processes see it."""

    queue: EventQueue
    fabric: Fabric
    draw: random.Random
    workers: dict[str, SimulatedRole]

    def next_number(self) -> int:
        """Return a number that no other process or listener has."""


class SimulatedRole:
    """A role of a process; to the coordinator it is a worker."""

    def __init__(self, process: SimulatedProcess, name: str, role: Role) -> None:
        self.process, self.name, self.role = process, name, role
        self.network = SimulatedNetwork(process, process.readable, process.simulation.next_number())
        process.roles[role] = process.simulation.workers[name] = self

    @property
    def core(self) -> Any:
        return self.process.worker.roles[self.role].core

    @property
    def id(self) -> PeerId:
        return (self.name, self.process.worker.roles[self.role].links.incarnation)

    def stop(self) -> None:
        """The role has ended, or its process."""
        if self.process.roles.pop(self.role, None) is not None:
            del self.process.simulation.workers[self.name]


class NoGrammars:
    """No simulated request asks for one."""

    def submit(self, order: object) -> None:
        raise NotImplementedError

    def report(self, core: object) -> None: ...


class VirtualClock:
    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue

    def now(self) -> float:
        return self._queue.now


class SimulatedProcess:
    """One process, from its start to its end."""

    def __init__(self, simulation: Surroundings, name: str, pool: Pool, device: Device) -> None:
        self.simulation, self.queue, self.pool, self.device = simulation, simulation.queue, pool, device
        self.clock, self.fabric = VirtualClock(self.queue), simulation.fabric
        self.message_s = pool.message_s
        self.is_alive = True
        self.rests = False
        """Its messages at each heartbeat are those of the last one: it does not tick."""
        self.catching_up = False
        """It makes up for a tick at which it rested: the coordinator knows what it would send."""
        self.link = Link(pool)
        self.readable: set[object] = set()
        self.roles: dict[Role, SimulatedRole] = {}
        self.pid = simulation.next_number()
        self.fabric.processes[self.pid] = self
        device.wake = self.turn
        self.worker = Worker(self._settings(name), self._parts())
        first = int(self.queue.now * TICKS_BEGIN) + 1 + int(TICK_S * TICKS_BEGIN * simulation.draw.random())
        self._ticked = first / TICKS_BEGIN
        self.queue.at(self._ticked, self._tick)

    # --- its life --------------------------------------------------------------------------------

    def alive(self) -> bool:
        """See ``LocalProcess``."""
        return self.is_alive

    def die(self) -> None:
        """End now. What was sent is on its way."""
        self.is_alive = False
        for role in list(self.roles.values()):
            role.stop()
        self.fabric.remove(self.pid)
        self.device.stop()

    def turn(self) -> None:
        """One turn of the loop, if the process lives."""
        if not self.is_alive:
            return
        if self.rests:
            self._rouse()
        self.device.report_layers()
        self.worker.turn(self.readable, self.queue.now)
        self.device.await_layers()
        if self.worker.is_over:
            self.worker.close()
            self.die()

    def _tick(self) -> None:
        self._ticked = now = self.queue.now
        self.turn()
        if not self.is_alive:
            return
        reported = all(role.network.reported_at == now for role in self.roles.values())
        self.rests = reported and self.device.may_jump and not self.device.busy and self.worker.at_rest
        if not self.rests:
            self.queue.at(now + TICK_S, self._tick)

    def _rouse(self) -> None:
        """Tick again, at the times at which it would have ticked. Of those that have passed, the last one is
        made up for."""
        self.rests = False
        if num_missed := int((self.queue.now - self._ticked) / TICK_S):
            self._ticked += num_missed * TICK_S
            self.catching_up = True
            self.worker.turn(set(), self._ticked)
            self.catching_up = False
        self.queue.at(self._ticked + TICK_S, self._tick)

    # --- what the loop is given ------------------------------------------------------------------

    def _settings(self, name: str) -> PrefillSettings | DecodeSettings | FlexibleSettings:
        pool = self.pool
        common: dict[str, Any] = {
            "name": name,
            "coordinator": COORDINATOR,
            "orphaned_after_s": float("inf"),  # its heartbeat is not simulated
            "listen": "tcp://*:*",
            "data_listen": "tcp://*:*",
        }
        if pool.role == "colocated" or pool.flexible or pool.borrow:
            return FlexibleSettings.model_construct(
                **common,
                start_as="mixed" if pool.role == "colocated" else pool.role,
                borrow=pool.borrow,
                max_num_seqs=pool.max_num_seqs,
                max_batch_tokens=pool.max_batch_tokens,
            )
        if pool.role == "prefill":
            return PrefillSettings.model_construct(**common, max_batch_tokens=pool.max_batch_tokens)
        return DecodeSettings.model_construct(**common, max_num_seqs=pool.max_num_seqs)

    def _parts(self) -> WorkerParts:
        memory = self.pool.memory
        progress = partial(LayerProgress, _nothing)
        return WorkerParts(
            self.clock,
            ModelFacts(identity_of(memory), frozenset(), memory.longest, 1 << 30, memory.num_layers),
            BlockManager(memory.num_blocks),
            self.pid,
            incarnations(self.simulation.draw.getrandbits),
            lambda: bytes(SECRET_BYTES),
            self._open,
            Steps(self.device, memory.num_layers, progress, self.clock.now, launches=False),
            lambda patience_s: set(),
            _nothing,
            _nothing,
            times=WorkerTimes(tick=TICK_S),
            check_bytes=1
            << 62,  # the time that checks take is the network's: see ``SimulatedListener.arrival``
        )

    def _environment(self, network: SimulatedNetwork) -> Environment:
        memory = self.pool.profile.memory
        mover = LinkMover(self.link, self.fabric.link_at, self.queue, self.turn)
        return Environment(self.clock, network, KvBlocks(memory.num_layers, memory.block_bytes), mover)

    def _open(self, settings: PrefillSettings | DecodeSettings, role: Role) -> RoleParts:
        """A role begins; it takes part in the next turn, which is made at once."""
        self.queue.after(0.0, self.turn)
        opened = SimulatedRole(self, settings.worker_id, role)
        return RoleParts(
            self._environment(opened.network),
            (MOVER,),
            NoGrammars(),
            opened.stop,
            targets=targets_at(opened.network.port),
            advertised_host=HOST,
        )


def _nothing() -> None: ...


def identity_of(memory: Memory) -> ModelIdentity:
    """Workers of equal blocks fit together."""
    return ModelIdentity(
        kv_name="one model",
        dtype="simulated",
        block_size=memory.block_size,
        cache_map=states(1, memory.block_bytes),
        block_bytes=memory.block_bytes,
    )
