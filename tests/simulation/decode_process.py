"""A decode worker's process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from simulation.agents import AgentTarget
from simulation.communicators import RendezvousTarget
from simulation.environment import BLOCK_BYTES
from simulation.model import EOS
from simulation.movers import MappedTarget, ParcelTarget
from simulation.worker_process import BLOCK_SIZE, DRAIN_S, MAX_MODEL_LEN, MODEL, TIMES, WorkerProcess

from splitserve.decode.core import DecodeCore
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.transport.handoff.protocol import Join, Key, Supersede, ToPeer
from splitserve.transport.handoff.receiver import HandoffReceiver
from splitserve.transport.handoff.receiving_end import RECEIVING, ReceivingEnd
from splitserve.transport.messages.messages import FROM_DECODE, Message
from splitserve.transport.movers.interface import MoverEndpoints, PutTarget
from splitserve.transport.movers.targets import MoverTargets

if TYPE_CHECKING:
    from simulation.flexible_process import FlexibleProcess
    from simulation.world import World

BLOCKS_A_CHECK = (1, 2, 8, 100)


class DecodeProcess(WorkerProcess):
    """``core`` is the real one; its memory may be written by others."""

    role = "decode"
    base_step_s = 0.02
    core: DecodeCore

    def __init__(
        self, world: World, name: str, host: str, num_blocks: int, process: FlexibleProcess | None = None
    ) -> None:
        super().__init__(world, name, host, num_blocks, process)
        assert self.core.moving is not None
        self.start_sending(self.core.moving.sender)
        self._check_is_due = False

    def open_targets(self) -> MoverTargets:
        self.parcels, self.agents = ParcelTarget(self), AgentTarget(self)
        self.rendezvous = RendezvousTarget(self) if self.world.scenario.cluster.rendezvous else None
        targets: dict[str, PutTarget] = {"cuda_ipc": MappedTarget(), "shm": MappedTarget()}
        if self.rendezvous is not None:
            targets["nccl"] = self.rendezvous
        targets |= {"nixl": self.agents, "tcp": self.parcels}
        endpoints = MoverEndpoints(tuple(targets), self.host, shm_name="shm", data_address=str(self.endpoint))
        return MoverTargets(targets, endpoints, lambda _: self.world.counts.update(("writers shut out",)))

    def make_core(self) -> DecodeCore:
        max_num_seqs = self.world.scenario.cluster.max_num_seqs
        scheduler = DecodeScheduler(
            self.blocks, BLOCK_SIZE, max_num_seqs, MAX_MODEL_LEN, EOS, window=self.model.window
        )
        movers, check_bytes = self.open_targets(), BLOCK_BYTES * self.world.random.choice(BLOCKS_A_CHECK)
        self.receiving = ReceivingEnd(self.environment, movers, self.name, self.host, check_bytes)
        receiver = HandoffReceiver(
            self.id,
            self.model,
            self.blocks,
            movers.endpoints,
            lambda: self.core.room(),
            lambda: self.world.random.randbytes(16),
            TIMES,
        )
        return DecodeCore(self.id, scheduler, receiver, MODEL.fingerprint, self.meet(), DRAIN_S)

    def runs_ahead(self) -> bool:
        return True

    def take(self) -> list[Any]:
        return self.core.take(self.now)

    def from_coordinator(self, message: Message) -> None:
        self.core.from_coordinator(message, self.now)

    def shrink_step(self, step: Any) -> None:
        self.core.shrink_step(step)

    def request_ids(self, step: Any) -> Iterable[str]:
        return (sequence.request_id for sequence in step.sequences)

    def still_held(self, keys: set[Key]) -> Iterable[Key]:
        moving = self.core.moving.keys() if self.core.moving is not None else ()
        return keys.intersection((*self.core.scheduler.held, *self.core.receiver.keys(), *moving))

    def rename_core(self) -> None:
        self.core.rename(self.incarnation)

    def block_tables(self) -> Iterable[Sequence[int]]:
        return self.core.block_tables()

    def heartbeat(self) -> None:
        self.receiving.release_dead_writers(self.core, self.now)
        super().heartbeat()

    def receive_from_peers(self, ready: set[object], now: float) -> None:
        self.receiving.receive(ready, self.core, now, lambda message, now: None)

    def do(self, action: Any) -> None:
        if isinstance(action, RECEIVING) or (
            isinstance(action, ToPeer) and isinstance(action.message, FROM_DECODE)
        ):
            self.receiving.carry_out(action)
        elif not isinstance(action, Join | Supersede):  # the core has seen to it
            self.sending.carry_out(action)

    def turn(self) -> None:
        """Most blocks are verified at once, some later; of many, some in each turn."""
        super().turn()
        if self.receiving.has_checks and not self._check_is_due and self.alive and not self.frozen:
            random = self.world.random.random
            if random() < 0.8:
                self.receiving.check(self.core, self.now)
                super().turn()
            if self.receiving.has_checks:
                self._check_is_due = True
                self.after(0.004 * random(), self._check_rest)

    def _check_rest(self) -> None:
        self._check_is_due = False
        self.receiving.check(self.core, self.now)
        self.turn()

    def die(self) -> None:
        super().die()
        self.agents.close_all()

    # --- blocks that come ------------------------------------------------------------------------

    def written_by_itself(self, lease: int, blocks: list[int], start: int, slices: list[list[int]]) -> None:
        """By a communicator: what has been received is copied into the pool."""
        if (
            not set(blocks) <= set(self.core.receiver.leases.blocks_open_to(lease))
            or self.core.receiver.leases.mover_of(lease) != "nccl"
        ):
            self.world.violated(
                f"{self.name}: blocks {blocks} were written under lease {lease}, which had ended "
                "or is another mover's"
            )
        for block, values in zip(blocks, slices, strict=True):
            self.memory.write(block, start, values)

    def written_by_peer(self, lease: int, block: int, start: int, values: list[int]) -> None:
        """The one-sided mover: the memory changes, whatever this process thinks or does."""
        if block not in self.core.receiver.leases.blocks_open_to(lease):
            self.world.violated(
                f"{self.name}: block {block} was written under lease {lease}, which had ended"
            )
        if self.core.receiver.leases.mover_of(lease) in ("tcp", "nccl"):
            self.world.violated(
                f"{self.name}: block {block} was written by its peer itself, under a lease of another mover"
            )
        self.memory.write(block, start, values)
