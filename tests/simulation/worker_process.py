"""A worker's process: the live loop, woken by messages, movers, steps and ticks as the live poll would be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace
from simulation.adapters import ProcessAdapters
from simulation.channels import VirtualChannel
from simulation.environment import BLOCK_BYTES, REACH, VirtualClock
from simulation.memory import Memory
from simulation.model import EOS, NUM_LAYERS, VOCABULARY
from simulation.process import Killed, Process
from simulation.step_device import VirtualStepDevice
from simulation.stores import VirtualStore
from simulation.watched_blocks import WatchedBlocks
from simulation.worker_role import WorkerRole

from splitserve.engine.errors import EngineError
from splitserve.engine.step.step_progress import LayerProgress
from splitserve.transport.handoff.layer_slicing import SlicingMode
from splitserve.transport.handoff.protocol import HandoffTimes
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import Cancel, ModelIdentity, PeerId, Role, from_u32
from splitserve.worker.loop import Worker
from splitserve.worker.parts import ModelFacts, RoleParts, WorkerParts, WorkerTimes
from splitserve.worker.settings import DecodeSettings, FlexibleSettings, PrefillSettings
from splitserve.worker.steps import Steps

if TYPE_CHECKING:
    from simulation.world import World

BLOCK_SIZE = 4
MAX_MODEL_LEN = 160
MODEL = ModelIdentity(
    kv_name="simulated",
    dtype="int",
    block_size=BLOCK_SIZE,
    cache_map=states(1, BLOCK_BYTES),
    block_bytes=BLOCK_BYTES,
)
TICK_S, HEARTBEAT_S = 0.1, 0.2
TIMES = WorkerTimes(
    tick=0.9 * TICK_S,  # due at each tick, whatever the process's clock
    rest=0.45,  # its peers ask again every ``resend``
    answers=1.5,
    handoff=HandoffTimes(resend=0.2, grant=6.0, ack=1.5, lease=0.6, waiting=1.0, silence=2.5, test=0.9),
    reach=REACH,
)
DRAFT_COST = 0.05
DRAIN_S = 1.5
ORPHANED_S = 1.5
"""Without a message of a coordinator."""
CHECK_S = 0.004
"""A turn that left blocks to be verified is followed by another within this time."""
BLOCKS_A_CHECK = (1, 2, 8, 100)
MODES: tuple[SlicingMode, ...] = ("auto", "layers", "blocks")
Kind = Literal["prefill", "decode", "mixed"]
Home = Literal["", "prefill", "decode"]
SETTINGS: dict[Kind, type[PrefillSettings | DecodeSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}


class WorkerProcess(Process):
    """``kind``: what it begins as. ``flexible``: it can change its role. ``home``: which of both roles a
    mixed one prefers, where it borrows."""

    def __init__(
        self,
        world: World,
        name: str,
        host: str,
        num_blocks: int,
        kind: Kind,
        flexible: bool = False,
        home: Home = "",
    ) -> None:
        super().__init__(world, name)
        self.host, self.num_blocks, self.latest, self.flexible = host, num_blocks, kind, flexible
        self.home = home
        self.pid = world.next_number()
        self.build = world.builds.drawn(name, self.pid)
        cluster = world.scenario.cluster
        self.model = replace(MODEL, window=cluster.window, state_blocks=cluster.state_blocks)
        self.adapters = ProcessAdapters(self)
        repeats, shift = bool(cluster.drafts), self.adapters.shift
        self.memory = Memory(num_blocks, BLOCK_SIZE, cluster.window, repeats, shift)
        self.writers: dict[Process, Counter[int]] = {}  # that are copying into these blocks of ours
        self.blocks = WatchedBlocks(num_blocks, self)
        self.hung_until = self.slow_until = 0.0
        self.turning = self._called = False
        self._num_ticks = 0
        self.roles: dict[Role, WorkerRole] = {}
        launches = world.random.random() < cluster.prefill_ahead
        self.device = VirtualStepDevice(self, launches)
        world.pids[self.pid] = world.processes[name] = self
        self.worker = Worker(self._settings(), self._parts(launches))
        self._watch_roles()
        self.after(TICK_S * world.random.random(), self._tick)

    @property
    def leaving(self) -> bool:
        """Whether it is to end in good order."""
        return self.worker._leaving

    @property
    def num_retiring(self) -> int:
        """Roles that have ended, while some peer has not confirmed it."""
        return len(self.worker._retiring)

    def role_ids(self) -> list[PeerId]:
        """Those of its roles, without one that begins in this very turn."""
        return [role.id for role in self.roles.values() if role.reach_check is not None]

    def poll(self) -> None:
        """One turn of the loop."""
        if self.turning:
            self._called = True
        elif self.alive:
            self._turn()

    def leave(self) -> None:
        """A signal, which a process that stands still gets when it goes on."""
        self.run(self.worker.leave)

    def die(self) -> None:
        super().die()
        for role in list(self.roles.values()):
            role.die()

    def freeze(self, seconds: float) -> None:
        self.world.struck.update(self.role_ids())
        super().freeze(seconds)

    def audit(self) -> None:
        """A process that is to end leaves some blocks to nobody with its first role."""
        if not self.leaving:
            self.blocks.audit(self._block_tables())

    def _turn(self) -> None:
        self.turning, self._called = True, False
        roles = list(self.roles.values())
        ready = {socket for role in roles for socket in role.network.readable}
        cancelled = [
            (role, message)
            for role in roles
            for channel in role.network.readable
            if type(channel) is VirtualChannel
            for message in channel.inbox
            if type(message) is Cancel
        ]
        try:
            self.worker.turn(ready, self.now)
        except Killed:
            return
        except EngineError:  # its supervisor starts it anew
            self.world.counts["workers that ended themselves"] += 1
            self._end()
            return
        self.turning = False
        if self.worker.is_over:
            self._end()
            return
        self._watch_roles()
        if self.latest == "mixed":
            self._check_roles()
        for role, message in cancelled:
            if role.alive and not self.frozen:
                role.check_cancelled(
                    {(message.coordinator, dispatch) for dispatch in from_u32(message.dispatches)}
                )
        if self._called:
            self.after(0.0, self.poll)
        elif not self.worker.patience():
            self.after(CHECK_S * self.world.random.random(), self.poll)

    def _watch_roles(self) -> None:
        for role in self.roles.values():
            role.watch()

    def _check_roles(self) -> None:
        """A mixed worker has both roles, or ends."""
        leaves = [role.played.departure.has_begun for role in self.roles.values()]
        if not all(leaves) and (len(leaves) < 2 or any(leaves)):
            self.world.violated(f"{self.name}: one of both roles has ended or leaves, the other goes on")

    def _end(self) -> None:
        self.turning = True
        with suppress(Killed):  # it is over: a copy that cannot be called back ends it by force
            self.worker.close()
        self.turning = False
        self.world.kill(self)

    def _tick(self) -> None:
        self.after(TICK_S, self._tick)
        self.poll()
        self._num_ticks += 1
        if self._num_ticks % 4 == 0 and self.alive:
            for role in self.roles.values():
                self.world.checks.look(role)
            if self._num_ticks % 16 == 0:
                self.audit()

    def _block_tables(self) -> Iterator[Sequence[int]]:
        for role in self.roles.values():
            yield from role.core.block_tables()

    # --- what the loop is given ------------------------------------------------------------------

    def _settings(self) -> PrefillSettings | DecodeSettings | FlexibleSettings:
        cluster = self.world.scenario.cluster
        return (FlexibleSettings if self.flexible else SETTINGS[self.latest]).model_construct(
            name=self.name,
            coordinator=",".join(self.world.coordinators_known_to_a_worker()),
            start_as=self.home or self.latest,
            borrow=bool(self.home),
            max_num_seqs=cluster.max_num_seqs,
            num_speculative_tokens=cluster.drafts,
            mtp=cluster.mtp,
            max_batch_tokens=cluster.max_batch_tokens,
            listen="tcp://*:*",
            drain_timeout_s=DRAIN_S,
            orphaned_after_s=ORPHANED_S,
        )

    def _parts(self, launches: bool) -> WorkerParts:
        world, clock = self.world, VirtualClock(self)
        progress = partial(LayerProgress, self.poll)
        return WorkerParts(
            clock,
            ModelFacts(
                self.model,
                EOS,
                MAX_MODEL_LEN,
                VOCABULARY,
                NUM_LAYERS,
                takes_images=world.scenario.cluster.images,
                draft_cost=DRAFT_COST * world.scenario.cluster.mtp,
            ),
            self.blocks,
            self.pid,
            world.hosts[self.host].incarnations(),
            lambda: world.random.randbytes(16),
            self._open,
            Steps(self.device, NUM_LAYERS, progress, clock.now, launches),
            lambda patience_s: set(),
            self.poll,
            lambda: None,
            store=VirtualStore(self) if world.scenario.cluster.store else None,
            adapters=self.adapters.slots,
            times=TIMES,
            slicing=world.random.choice(MODES),
            check_bytes=BLOCK_BYTES * world.random.choice(BLOCKS_A_CHECK),
        )

    def _open(self, settings: PrefillSettings | DecodeSettings, role: Role) -> RoleParts:
        self.world.counts["roles begun"] += bool(self.roles)
        if self.latest != "mixed":
            self.latest = role
        opened = self.roles[role] = self.world.workers[settings.worker_id] = WorkerRole(
            self, settings.worker_id, role
        )
        return opened.parts()
