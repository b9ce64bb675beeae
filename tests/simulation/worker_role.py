"""One role of a worker's process. To everything outside it is a worker of its own: it has a name, a network
and movers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import TYPE_CHECKING, Any

from simulation.agents import AgentTarget
from simulation.channels import VirtualNetwork
from simulation.clock import Event
from simulation.communicators import RendezvousTarget
from simulation.environment import ReachCheck, environment_of
from simulation.memory import Memory
from simulation.targets import MappedTarget, ParcelTarget, blocks_open_to, mover_of
from simulation.watched_blocks import WatchedBlocks

from splitserve.engine.step.constraint import CompileGrammar
from splitserve.engine.step.grammar import CompilingCore
from splitserve.prefill.core import PrefillCore
from splitserve.transport.handoff.protocol import Key
from splitserve.transport.messages.messages import PeerId, Role
from splitserve.transport.movers.interface import MoverEndpoints, PutTarget
from splitserve.transport.movers.targets import MoverTargets
from splitserve.worker.parts import RoleParts
from splitserve.worker.played_role import PlayedRole

if TYPE_CHECKING:
    from simulation.worker_process import WorkerProcess

BAD_GRAMMAR = b"bad"


class Matcher:
    """Allows everything: the model follows each grammar."""

    def failure(self, num_outputs: int) -> str:
        return ""

    def mask(self, output_token_ids: object) -> Any:
        raise NotImplementedError


class VirtualGrammars:
    """Compiles one after the other, as the live thread does, each in no time or long."""

    def __init__(self, role: WorkerRole) -> None:
        self._role, self._compiled = role, list[CompileGrammar]()
        self._random, self._busy_until = Random(f"grammars {role.world.seed} {role.endpoint}"), 0.0

    def submit(self, order: CompileGrammar) -> None:
        now = self._role.world.queue.now
        self._busy_until = max(now, self._busy_until) + 1.0 * self._random.random() ** 4
        self._role.after(self._busy_until - now, self._done, order)

    def _done(self, order: CompileGrammar) -> None:
        self._role.world.counts["grammars compiled"] += 1
        self._compiled.append(order)
        self._role.poll()

    def report(self, core: CompilingCore) -> None:
        compiled, self._compiled = self._compiled, []
        for order in compiled:
            if order.key is not None and order.grammar == BAD_GRAMMAR:
                core.grammar_failed(order.key, "it does not compile")
            elif order.key is not None:
                core.grammar_compiled(order.key, Matcher())


class WorkerRole:
    """``alive`` until the role has ended, or its process."""

    def __init__(self, process: WorkerProcess, name: str, role: Role) -> None:
        self.process, self.world, self.name, self.role = process, process.world, name, role
        self.host, self.num_blocks = process.host, process.num_blocks
        self.memory: Memory = process.memory
        self.blocks: WatchedBlocks = process.blocks
        self.network = VirtualNetwork(process, process.host, name)
        self.endpoint: int = self.world.next_number()  # survives a change of incarnation, not a restart
        self.num_broken: Counter[tuple[PeerId, PeerId]] = self.network.num_broken
        self._is_over = False
        self.played: PlayedRole  # the live one
        self.reach_check: ReachCheck | None = None
        self.parcels, self.agents = ParcelTarget(self), AgentTarget(self)
        self.rendezvous = RendezvousTarget(self) if self.world.scenario.cluster.rendezvous else None

    def parts(self) -> RoleParts:
        """What the live role takes from outside."""
        return RoleParts(
            environment_of(self),
            self._movers(),
            VirtualGrammars(self),
            self.stop,
            targets=self._targets(),
            advertised_host=self.host,
        )

    def _movers(self) -> tuple[str, ...]:
        cluster, random = self.world.scenario.cluster, self.world.random.random
        one_sided = random() < cluster.one_sided
        by_rendezvous = cluster.rendezvous > 0.0 and random() < cluster.rendezvous
        by_agent = cluster.agents > 0.0 and random() < cluster.agents
        by_copies = cluster.copies > 0.0 and random() < cluster.copies
        able = {"cuda_ipc": by_copies, "shm": one_sided, "nccl": by_rendezvous, "nixl": by_agent, "tcp": True}
        return tuple(mover for mover, has in able.items() if has)

    def _targets(self) -> MoverTargets:
        targets: dict[str, PutTarget] = {"cuda_ipc": MappedTarget(), "shm": MappedTarget()}
        if self.rendezvous is not None:
            targets["nccl"] = self.rendezvous
        targets |= {"nixl": self.agents, "tcp": self.parcels}
        endpoints = MoverEndpoints(tuple(targets), self.host, shm_name="shm", data_address=str(self.endpoint))
        return MoverTargets(targets, endpoints, lambda _: self.world.counts.update(("writers shut out",)))

    # --- its life --------------------------------------------------------------------------------

    @property
    def core(self) -> Any:
        return self.played.core

    @property
    def id(self) -> PeerId:
        return (self.name, self.played.links.incarnation)

    @property
    def alive(self) -> bool:
        return self.process.alive and not self._is_over

    @property
    def awake(self) -> bool:
        return self.alive and self.process.awake

    @property
    def now(self) -> float:
        return self.process.now

    def stop(self) -> None:
        """The role has ended; its process may go on."""
        self._is_over = True
        del self.process.roles[self.role]
        if self.process.flexible:
            del self.world.workers[self.name]
        else:
            self.world.struck[self.id] += 1

    def die(self) -> None:
        """The process has ended."""
        self.agents.close_all()
        if self.process.flexible:
            del self.world.workers[self.name]

    def run(self, event: Event, *args: Any) -> None:
        """See ``Process``."""
        self.process.run(self._run, event, args)

    def after(self, delay: float, event: Event, *args: Any) -> None:
        """See ``Process``."""
        self.process.after(delay, self._run, event, args)

    def _run(self, event: Event, args: tuple[Any, ...]) -> None:
        if not self._is_over:
            event(*args)

    def poll(self) -> None:
        self.process.poll()

    # --- checks ----------------------------------------------------------------------------------

    def watch(self) -> None:
        """Look at what the live role does, before its first turn."""
        if self.reach_check is None:
            self.played = self.process.worker.roles[self.role]
            self.reach_check = ReachCheck(self, self.played.core.sender)

    def check_cancelled(self, keys: set[Key]) -> None:
        """A turn has gone by since these were cancelled."""
        for key in self._still_held(keys):
            self.world.violated(f"{self.name}: {key} was cancelled, and a turn later something of it is held")

    def _still_held(self, keys: set[Key]) -> Iterable[Key]:
        """Those of which something is here that no step in flight uses."""
        core = self.core
        if isinstance(core, PrefillCore):
            yield from keys.intersection(core.sender.outgoing)
            for key in keys.intersection(core.scheduler.held):
                sequence = core.scheduler.running.get(key)
                if sequence is None or not (sequence.in_step and sequence.cancelled):
                    yield key
        else:
            yield from keys.intersection((*core.scheduler.held, *core.receiver.keys(), *core.moving.keys()))

    # --- blocks that come ------------------------------------------------------------------------

    def written_by_itself(self, lease: int, blocks: list[int], start: int, slices: list[list[int]]) -> None:
        """By a communicator: what has been received is copied into the pool."""
        leases = self.core.receiver.leases
        if not set(blocks) <= set(blocks_open_to(leases, lease)) or mover_of(leases, lease) != "nccl":
            self.world.violated(
                f"{self.name}: blocks {blocks} were written under lease {lease}, which had ended "
                "or is another mover's"
            )
        for block, values in zip(blocks, slices, strict=True):
            self.memory.write(block, start, values)

    def written_by_peer(self, lease: int, block: int, start: int, values: list[int]) -> None:
        """The one-sided mover: the memory changes, whatever this process thinks or does."""
        leases = self.core.receiver.leases
        if block not in blocks_open_to(leases, lease):
            self.world.violated(
                f"{self.name}: block {block} was written under lease {lease}, which had ended"
            )
        if mover_of(leases, lease) in ("tcp", "nccl"):
            self.world.violated(
                f"{self.name}: block {block} was written by its peer itself, under a lease of another mover"
            )
        self.memory.write(block, start, values)
