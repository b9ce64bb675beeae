"""What the dispatcher of a simulated coordinator touches, in virtual time: timers, a control socket and a
watch on processes; and what is held against the rules there."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from simulation.channels import VirtualChannel, VirtualListener, VirtualNetwork

from splitserve.coordinator.lifecycle.actions import Send, is_for_strangers
from splitserve.coordinator.lifecycle.worker import WorkerId, WorkerRecord
from splitserve.transport.channels.coordinator_link import identity_of, worker_of
from splitserve.transport.messages.messages import FROM_WORKER, Hello, Message, Move, Prefill, Resume

if TYPE_CHECKING:
    from simulation.coordinator_process import CoordinatorProcess

HOST = "host-0"
READ_S = 0.0005  # between an arrival and its turn of the loop
LATE_TURN_S = 1.0


class Defect(Exception):
    """A mistake of ours, in the middle of a call that the event loop has made. The loop goes on."""


class VirtualTimer:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class VirtualTimers:
    """The event loop of a coordinator. It may be busy with other things, and late."""

    def __init__(self, process: CoordinatorProcess) -> None:
        self._process, self._world = process, process.world

    def now(self) -> float:
        return self._process.now

    def call_now(self, callback: Callable[..., object], *args: object) -> None:
        """Call; a Defect ends this call and nothing else."""
        self._call(VirtualTimer(), callback, args)

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        self._process.after(0.0, self.call_now, callback, *args)

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: object) -> VirtualTimer:
        timer, world = VirtualTimer(), self._world
        if world.strikes(world.scenario.faults.late_turn, "late turns of a coordinator"):
            delay_s += LATE_TURN_S * world.random.random() ** 2
        self._process.after(delay_s, self._call, timer, callback, args)
        return timer

    def _call(self, timer: VirtualTimer, callback: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            if not timer.cancelled:
                callback(*args)
        except Defect:
            self._world.counts["defects of a coordinator"] += 1


class VirtualControlSocket(VirtualListener):
    """Another thread receives, also while the process's loop stands still; ``read`` is called soon after."""

    def __init__(self, process: CoordinatorProcess, sees_connections: bool) -> None:
        """``sees_connections``: it notices that a worker's connection is gone, as ZeroMQ does."""
        super().__init__(VirtualNetwork(process, HOST), process.name, frozenset(FROM_WORKER))
        self._process, self._sees_connections = process, sees_connections
        self._lost_any = self._read_failed = False
        self.reached: dict[WorkerId, bool] = {}  # by the last call of ``reach``

    def come(self, channel: VirtualChannel, message: Message) -> None:
        if self._process.alive:
            self._check_owner(message)
            if isinstance(message, Hello):
                self._note_displaced(message)
            self.arrive(channel, message)

    def connection_lost(self) -> None:
        """Some worker's process has ended."""
        self._lost_any = self._sees_connections

    # --- what the dispatcher calls ---------------------------------------------------------------

    def reach(self, peer: bytes, *messages: Message) -> bool:
        worker = worker_of(peer)
        assert worker is not None
        self._process.sends.sent(worker, messages)
        self._process.maybe_defect()
        try:
            sent = self.send(peer, *messages)
        except Exception as error:  # the dispatcher would bear it
            self.world.violated(f"{self.address}: cannot send: {error!r}")
            raise
        if not sent and self._sees_connections and worker in self._process.core.pools.workers:
            self.world.counts["connections found gone"] += 1
        self.reached[worker] = sent or not self._sees_connections
        return self.reached[worker]

    def receive(self, limit: int) -> list[tuple[bytes, Message]]:
        self._read_failed = True
        self._process.maybe_defect()
        self._read_failed = False
        messages, self.inbox = self.inbox[:limit], self.inbox[limit:]
        return messages

    def lost_any(self) -> bool:
        lost, self._lost_any = self._lost_any, False
        return lost

    # --- what must be true -----------------------------------------------------------------------

    def unread(self, worker: WorkerId) -> str:
        """What of a worker that has ended was not read; empty: nothing."""
        identity, faults = identity_of(*worker), self.world.scenario.faults
        if self._read_failed:  # by a planted defect
            return ""
        if any(sender == identity for sender, _ in self.inbox):
            return "messages that had arrived"
        if faults.drop or faults.mangle or faults.late or faults.double or faults.partition_every:
            return ""
        return "messages that were on the way" if self.on_the_way[identity] > 0 else ""

    def _note_displaced(self, hello: Hello) -> None:
        """A dead worker's late Hello displaces the living one of that name: a death that its requests see."""
        living = self.world.workers.get(hello.worker_id)
        if living is not None and living.id[1] != hello.incarnation:
            self.world.struck[living.id] += 1

    def _check_owner(self, message: Message) -> None:
        """A request is its coordinator's alone."""
        others = {
            other.core.incarnation
            for other in self.world.coordinators.values()
            if other.name != self._process.name
        }
        if getattr(message, "coordinator", 0) in others:
            self.world.violated(
                f"{self.address}: got a {type(message).__name__} about a request of another coordinator"
            )


class VirtualProcesses:
    """A watch on the processes of this coordinator's host. Some coordinators have none."""

    def __init__(self, process: CoordinatorProcess, random: Random) -> None:
        self._process = process
        self._notices_s = random.choice((None, 0.001, 1.0))  # within this time; None: never
        self._pids: dict[WorkerId, int] = {}
        self.ending: dict[WorkerId, int] = {}  # noticed, and not removed: how often that was looked at

    def watch(self, hello: Hello) -> None:
        worker = (hello.worker_id, hello.incarnation)
        if worker in self._pids:
            self._process.world.violated(f"{self._process.name}: watches the process of {worker} twice")
        if self._notices_s is not None and hello.host == HOST and self._process.world.pids[hello.pid].alive:
            self._pids[worker] = hello.pid

    def forget(self, worker: WorkerId) -> None:
        self._pids.pop(worker, None)

    def ended(self, pid: int) -> None:
        """This process has ended."""
        for worker, its in self._pids.items():
            if its == pid and self._notices_s is not None:
                self._process.after(
                    self._notices_s * self._process.world.random.random(), self._notice, worker
                )

    def _notice(self, worker: WorkerId) -> None:
        if self._pids.pop(worker, None) is not None:
            self._process.world.counts["ends of processes noticed"] += 1
            self.ending[worker] = 0
            self._process.dispatcher.process_ended(worker)

    def look(self) -> None:
        """A worker whose process was seen to end is removed soon."""
        for worker in self.ending:
            self.ending[worker] += 1
            if self.ending[worker] == 5:
                self._process.world.violated(
                    f"{self._process.name}: the process of {worker[0]} has ended, and it is still here"
                )

    def left(self) -> set[WorkerId]:
        """Workers that are not known any more and are still watched."""
        return self._pids.keys() - self._process.core.pools.workers.keys()


class SendCheck:
    """Holds what is sent against what the lifecycle has returned: every message once, those to one worker in
    order, none to a worker that has been removed."""

    def __init__(self, process: CoordinatorProcess) -> None:
        self._process, self._core = process, process.core
        self._due: defaultdict[WorkerId, deque[Message | None]] = defaultdict(deque)
        """None: the worker was removed, and what is due before that is dropped."""
        for name in ("submit", "cancel", "receive", "tick", "process_ended", "drain", "flip"):
            setattr(self._core, name, self._note_returned(getattr(self._core, name)))
        pools = process.core.pools
        self._reached, self._remove = pools.reached, pools.remove
        pools.reached, pools.remove = self._check_reached, self._note_removed  # type: ignore[method-assign]

    def sent(self, worker: WorkerId, messages: tuple[Message, ...]) -> None:
        """The dispatcher sends these now."""
        due = self._due[worker]
        for message in messages:
            while due and due[0] is not message and None in due:
                due.popleft()
            if not due or due.popleft() is not message:
                self._violated(f"a {type(message).__name__} to {worker[0]} was not the next one")
        if not all(self._may_get(worker, message) for message in messages):
            self._violated(f"sends {type(messages[0]).__name__} to {worker[0]}, which has been removed")

    def look(self) -> None:
        """Between two turns of the loop nothing waits to be sent."""
        for worker, due in self._due.items():
            while None in due:
                due.popleft()
            if due:
                self._violated(f"a {type(due[0]).__name__} to {worker[0]} was never sent")

    def _may_get(self, worker: WorkerId, message: Message) -> bool:
        return worker in self._core.pools.workers or is_for_strangers(message)

    def _note_returned(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            returned = method(*args)
            for action in returned[1] if isinstance(returned, tuple) else returned:
                if type(action) is Send and isinstance(action.message, Prefill | Move):
                    self._check_adapter(action.message, action.worker)
                if type(action) is Send and type(action.message) in (Prefill, Resume):
                    self._process.world.clients.tried(action.message, action.worker)
                if type(action) is Send and self._may_get(action.worker, action.message):
                    self._due[action.worker].append(action.message)
            return returned

        return noted

    def _check_adapter(self, order: Prefill | Move, worker: WorkerId) -> None:
        """Both workers have reported it."""
        for each in (
            *([] if isinstance(order, Move) else [worker]),
            (order.decode.worker_id, order.decode.incarnation),
        ):
            known = self._core.pools.workers.get(each)
            if known is not None and order.spec.adapter not in ("", *known.contents):
                self._violated(f"{each[0]} lacks the adapter of a {type(order).__name__}")

    def _note_removed(self, worker: WorkerRecord, reason: str) -> None:
        self._due[worker.id].append(None)
        self._remove(worker, reason)

    def _check_reached(self, worker: WorkerId, connected: bool, now: float) -> None:
        if connected != self._process.control.reached[worker]:
            self._violated(f"{worker[0]} was taken for {'' if connected else 'not '}connected")
        self._reached(worker, connected, now)

    def _violated(self, what: str) -> None:
        self._process.world.violated(f"{self._process.name}: {what}")
