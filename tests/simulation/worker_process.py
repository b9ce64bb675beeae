"""What the processes of both worker roles have in common: the loop around a core and the live shells."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from simulation.channels import VirtualNetwork
from simulation.environment import REACH, ReachCheck, environment_of
from simulation.memory import Memory
from simulation.model import VOCABULARY
from simulation.process import Process
from simulation.steps import FAILED, NO_MEMORY, SKIPPED, Steps
from simulation.watched_blocks import WatchedBlocks

from splitserve.transport.channels.coordinator_links import CoordinatorLinks
from splitserve.transport.handoff.protocol import HandoffTimes, Key, ToCoordinator
from splitserve.transport.handoff.sender import HandoffSender
from splitserve.transport.handoff.sending_end import SendingEnd
from splitserve.transport.messages.messages import (
    Cancel,
    Flip,
    Goodbye,
    Hello,
    Load,
    Meet,
    Message,
    ModelIdentity,
    RequestFailed,
    Role,
    from_u32,
)

if TYPE_CHECKING:
    from simulation.flexible_process import FlexibleProcess
    from simulation.world import World

BLOCK_SIZE = 4
MAX_MODEL_LEN = 160
MODEL = ModelIdentity(
    fingerprint="simulated",
    dtype="int",
    block_size=BLOCK_SIZE,
    layout="simulated",
    block_bytes=8 * BLOCK_SIZE,
)
TICK_S, HEARTBEAT_S = 0.1, 0.2
TIMES = HandoffTimes(resend=0.2, grant=6.0, ack=1.5, lease=0.6, waiting=1.0, silence=2.5)
DRAIN_S = 1.5
LINGER_S = 0.45  # of a role that is over, in a process that goes on: its peers ask again every TIMES.resend
ORPHANED_S = 1.5  # without a word of a coordinator
PeerId = tuple[str, int]


class WorkerProcess(Process, ABC):
    """An inbox, one step at a time, a heartbeat."""

    role: Role
    base_step_s: float
    sending: SendingEnd
    sender: HandoffSender
    reach_check: ReachCheck

    def __init__(
        self, world: World, name: str, host: str, num_blocks: int, process: FlexibleProcess | None = None
    ) -> None:
        """``process``: whose role it is, where that can change; the memory is then that one's."""
        super().__init__(world, name)
        self.host, self.num_blocks, self.process = host, num_blocks, process
        self.next_incarnation = process.next_incarnation if process else world.hosts[host].incarnations()
        self.network = VirtualNetwork(self, host)
        known = world.coordinators_known_to_a_worker()
        self.links = CoordinatorLinks(known, self.network, name, self, self.next_incarnation, ORPHANED_S)  # type: ignore[arg-type]
        self.endpoint = world.next_number()  # survives a change of incarnation, not a restart
        self.pid = process.pid if process else self.endpoint
        world.pids[self.pid] = process or self
        self.model = replace(MODEL, window=world.scenario.cluster.window)
        self.memory = (
            process.memory if process else Memory(num_blocks, BLOCK_SIZE, world.scenario.cluster.window)
        )
        self.blocks = process.blocks if process else WatchedBlocks(num_blocks, self)
        # processes in the middle of copying into these blocks of ours
        self.writers: dict[Process, Counter[int]] = process.writers if process else {}
        self.steps = Steps(self, self.runs_ahead())
        self.told_to_leave = False  # it was told to end in good order
        self.hung_until = self.slow_until = 0.0
        self._reported, self._num_ticks = -1e9, 0
        self._rests_since: float | None = None
        self._polls = False
        self.environment = environment_of(self)
        one_sided = world.random.random() < world.scenario.cluster.one_sided
        rendezvous = world.scenario.cluster.rendezvous
        by_rendezvous = rendezvous > 0.0 and world.random.random() < rendezvous
        agents = world.scenario.cluster.agents
        by_agent = agents > 0.0 and world.random.random() < agents
        copies = world.scenario.cluster.copies
        by_copies = copies > 0.0 and world.random.random() < copies
        able = {"cuda_ipc": by_copies, "shm": one_sided, "nccl": by_rendezvous, "nixl": by_agent, "tcp": True}
        self._movers = tuple(mover for mover, has in able.items() if has)
        self.core: Any = self.make_core()
        self.after(TICK_S * world.random.random(), self._tick)

    # --- what a role adds ------------------------------------------------------------------------

    @abstractmethod
    def make_core(self) -> Any: ...

    @abstractmethod
    def runs_ahead(self) -> bool:
        """Whether a step is made while the one before it runs."""

    @abstractmethod
    def take(self) -> list[Any]:
        """The core's actions."""

    @abstractmethod
    def from_coordinator(self, message: Message) -> None: ...

    @abstractmethod
    def do(self, action: Any) -> None:
        """Carries out an action that only this role has."""

    @abstractmethod
    def shrink_step(self, step: Any) -> None:
        """A step ran out of memory."""

    @abstractmethod
    def request_ids(self, step: Any) -> Iterable[str]:
        """Of the requests that a step computes."""

    @abstractmethod
    def still_held(self, keys: set[Key]) -> Iterable[Key]:
        """Those of which something is here that no step in flight uses."""

    @abstractmethod
    def rename_core(self) -> None:
        """It has a new incarnation."""

    @abstractmethod
    def block_tables(self) -> Iterable[Sequence[int]]:
        """Every list of blocks that something here holds references on."""

    # --- the loop --------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        return self.links.incarnation

    @property
    def id(self) -> PeerId:
        return (self.name, self.incarnation)

    def start_sending(self, sender: HandoffSender) -> None:
        """It hands over by this sender."""
        self.sender = sender
        self.sending = SendingEnd(sender, self.name, self.incarnation, self.environment, REACH)
        self.reach_check = ReachCheck(self, sender)

    def poll(self) -> None:
        """One turn of the loop, as the live one's: messages have come, or something has happened to a
        mover."""
        if self._polls or not self.alive:
            return
        self._polls = True
        ready, now = self.network.ready(), self.now
        messages = self.links.receive(ready, now)
        for message in messages:
            if isinstance(message, Flip):
                self._flip(message)
            else:
                self.from_coordinator(message)
        self.receive_from_peers(ready, now)
        self.sending.receive(ready, now)
        self._polls = False
        if not self.alive:  # it did not survive the end of a mover
            return
        self.turn()
        for message in messages:
            if isinstance(message, Cancel) and self.alive and not self.frozen:
                self._check_cancelled(
                    {(message.coordinator, dispatch) for dispatch in from_u32(message.dispatches)}
                )

    def receive_from_peers(self, ready: set[object], now: float) -> None:
        """From those that hand over to us."""

    def _check_cancelled(self, keys: set[Key]) -> None:
        for key in self.still_held(keys):
            self.world.violated(f"{self.name}: {key} was cancelled, and a turn later something of it is held")

    # --- what the links ask of the worker (see ``LinkedWorker``) ----------------------------------

    def welcomed(self, coordinator: int) -> None:
        self.core.drop_others(*self.links.coordinators)
        self._tell(self.core.block_events(everything=True))

    def fenced(self, incarnation: int) -> None:
        """What the old incarnation still owes its peers is sent before its channels close."""
        self.core.drop_others(-1)
        self.carry_out_all()
        self.sending.rename(incarnation)
        self.num_broken.clear()
        self.rename_core()

    def orphaned(self) -> None:
        self.world.counts["workers without a coordinator"] += 1
        self.core.drop_others(*self.links.coordinators)

    def turn(self) -> None:
        """One turn of the loop."""
        steps = self.steps
        if steps.any_ended:
            self._collect()
        if steps.wants_next:
            self._launch()
        if self.core.stirs and self.carry_out_all() and steps.wants_next:
            self._launch()  # what was just verified joins at once
        if self.core.may_leave and not self.frozen:
            self._leave()

    def _leave(self) -> None:
        """A process that ends takes its memory along; one that goes on in the other role must have every
        block back."""
        if self.process is not None and not self.told_to_leave:
            if not self.core.at_rest:
                self._rests_since = None
                return
            self._rests_since = self.now if self._rests_since is None else self._rests_since
            if self.now - self._rests_since < LINGER_S:
                return
        self._tell(Goodbye(worker_id=self.name, incarnation=self.incarnation))
        self.world.counts["workers drained"] += 1
        if self.process is None:
            self.world.kill(self)
        else:
            self.process.end(self)

    def _flip(self, message: Flip) -> None:
        """The other role begins in this process, and this one ends."""
        if self.process is not None and message.role != self.role and self.process.begin(message.role):
            self.world.counts["roles begun"] += not self.core.drains
            self.core.drain(self.now, message.timeout_s)

    @property
    def process_alive(self) -> bool:
        """Whether its process has not ended, though its role may have."""
        return self.process.alive if self.process is not None else self.alive

    def freeze(self, seconds: float) -> None:
        self.world.struck.update(
            role.id for role in (self.process.roles.values() if self.process is not None else (self,))
        )
        if self.process is not None:
            self.process.freeze(seconds)
        else:
            super().freeze(seconds)

    def leave(self) -> None:
        """Its process is told to end in good order."""
        if self.process is not None:
            self.process.tell_to_leave()
        else:
            self.told_to_leave = True

    def audit(self) -> None:
        """Of all its blocks, whichever role's. (A process that is to end leaves some to nobody with its first
        role.)"""
        if self.process is None:
            self.blocks.audit(self.block_tables())
        elif not self.process.leaving:
            self.blocks.audit(self.process.block_tables())

    def carry_out_all(self) -> bool:
        """Whatever the core wants done now. False: nothing."""
        busy = False
        run, queue = self.run, self._queue
        while self.core.stirs and (actions := self.take()):
            busy = True
            for action in actions:
                if not self.alive or queue.now < self._frozen_until or not self._inside:
                    run(self._carry_out, action)
                else:
                    self._carry_out(action)
        return busy

    def _collect(self) -> None:
        for step, outcome in self.steps.collect():
            if outcome is FAILED:
                self.core.fail_step(step, "the adversary says so")
            elif outcome is NO_MEMORY:
                self.shrink_step(step)
            elif outcome is SKIPPED:
                self.core.skip_step(step)
            else:
                self.core.complete(step, outcome, self.now)

    def _launch(self) -> None:
        steps = self.steps
        while steps.wants_next and not self.frozen and (step := self.core.schedule(self.now)) is not None:
            steps.submit(step)

    def begin(self, step: Any, duration: float) -> None:
        """A step is under way."""

    def finish(self, step: Any) -> Any:
        """What is left of a step; its output."""
        return self.memory.execute(step.batch, self.steps.token_ids(step.batch))

    def _carry_out(self, action: Any) -> None:
        if type(action) is ToCoordinator:
            self._tell(action.message)
        else:
            self.do(action)

    def _tick(self) -> None:
        self.after(TICK_S, self._tick)
        now = self.now
        if self.process is not None and self.process.mixed and self.core.drains:
            self.process.tell_to_leave()  # of both roles or of none
        if self.told_to_leave:
            self.core.drain(now)
        self.core.tick(now)
        self.links.tick(now)
        if self.links.coordinators and now - self._reported >= HEARTBEAT_S:
            self._reported = now
            self.heartbeat()
        self.poll()
        self._num_ticks += 1
        if self._num_ticks % 4 == 0 and self.alive:
            self.world.checks.look(self, thorough=self._num_ticks % 16 == 0)

    def heartbeat(self) -> None:
        self.links.report(self.core.load)
        self._tell(self.core.block_events())

    def _tell(self, message: Message | None) -> None:
        if type(message) is RequestFailed:
            self.world.counts[f"given back: {message.kind}"] += 1
            if message.kind != "preempted":
                self.world.given_back.add((message.coordinator, message.dispatch))
        if type(message) is Load:
            self.links.report(self.core.load)
        elif message is not None:
            self.links.send(message)

    def meet(self) -> Meet:
        """How it introduces itself to those that it hands over to."""
        return Meet(
            worker_id=self.name,
            incarnation=self.incarnation,
            host=self.host,
            pid=self.pid,
            model=self.model,
            movers=self._movers,
        )

    def hello(self, incarnation: int) -> Hello:
        cluster = self.world.scenario.cluster
        return Hello(
            worker_id=self.name,
            incarnation=incarnation,
            role=self.role,
            host=self.host,
            pid=self.pid,
            model=self.model,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCABULARY,
            num_blocks=self.num_blocks,
            max_num_seqs=cluster.max_num_seqs,
            max_batch_tokens=cluster.max_batch_tokens,
            peer_address=self.name if self.role == "decode" else "",
            process=self.process.name if self.process is not None else "",
            mixed=self.process.mixed if self.process is not None else False,
        )
