"""The real cores of all three roles under virtual time, with a seeded adversary between them.

Nothing of a core is written again here: the classes below are shells, as thin as the live ones, over a network that drops, delays,
doubles and reorders, processes that die, restart and freeze, blocks that arrive corrupt, and memory that is too small.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulation.model import EOS, VOCABULARY, Memory, expected_output

from splitserve.coordinator.flight import Action, End, Push, Send
from splitserve.coordinator.lifecycle import Lifecycle, LifecycleLimits
from splitserve.coordinator.request import Ended, GenerationRequest
from splitserve.decode.core import DecodeCore
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.engine.block_manager import BlockManager
from splitserve.prefill.core import PrefillCore
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport import actions as act
from splitserve.transport.handoff import HandoffTimes
from splitserve.transport.handoff_receiver import HandoffReceiver, MoverEndpoints
from splitserve.transport.messages import Fenced, Handoff, Hello, Meet, Message, ModelIdentity, Placed, Sampling, Welcome, u64

BLOCK_SIZE = 4
MODEL = ModelIdentity(fingerprint="simulated", dtype="int", block_size=BLOCK_SIZE, layout="simulated", block_bytes=8 * BLOCK_SIZE)
HEARTBEAT = 0.25
MAX_MODEL_LEN = 160


@dataclass(frozen=True)
class Faults:
    """How cruel the adversary is: probabilities per message or put, mean seconds between events (0: never)."""

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0  # a message is delayed by up to two seconds (and so overtaken)
    corrupt: float = 0.0  # a put writes something else
    freeze_in_put: float = 0.0  # a one-sided writer is stopped in the middle of its copy
    kill_every: float = 0.0
    freeze_every: float = 0.0
    coordinator_restart_every: float = 0.0
    cancel: float = 0.0  # share of requests whose client leaves in the middle


@dataclass
class Client:
    """What one client has seen."""

    request: GenerationRequest
    expected: list[int]
    reason: str
    tokens: list[int] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    cancelled: bool = False
    orphaned: bool = False  # its coordinator died


class NullSink:
    """The lifecycle never calls a sink; the shell does."""

    def push(self, token_id: int, logprobs: object) -> None: ...
    def push_prompt_logprobs(self, logprobs: object) -> None: ...
    def flush(self) -> None: ...
    def end(self, ended: object) -> None: ...


class World:
    """Virtual time, the network, and the processes."""

    def __init__(
        self, seed: int, faults: Faults, num_prefill: int = 2, num_decode: int = 2, prefill_blocks: int = 120, decode_blocks: int = 120
    ) -> None:
        self.random = random.Random(seed)
        self.seed, self.faults, self.calm = seed, faults, False
        self.now, self._order, self._events = 0.0, 0, list[tuple[float, int, Callable[[], None]]]()
        self.counts: Counter[str] = Counter()
        self.clients: dict[str, Client] = {}
        self.violations: list[str] = []
        self.incarnation = 0
        self.coordinator = self._new_coordinator()
        self.workers: dict[str, WorkerShell] = {}
        for i in range(num_prefill):
            self.workers[f"prefill-{i}"] = PrefillShell(self, f"prefill-{i}", prefill_blocks)
        for i in range(num_decode):
            self.workers[f"decode-{i}"] = DecodeShell(self, f"decode-{i}", decode_blocks)
        self.after(0.05, self._coordinator_tick)
        for every, fault in (
            (faults.kill_every, self._kill_one),
            (faults.freeze_every, self._freeze_one),
            (faults.coordinator_restart_every, self._restart_coordinator),
        ):
            if every:
                self._again(every, fault)

    # --- time ------------------------------------------------------------------------------------

    def after(self, delay: float, event: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.now + delay, self._order, event))

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        while self._events and self._events[0][0] <= until and not stop():
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = max(self.now, until) if not stop() else self.now

    def next_incarnation(self) -> int:
        self.incarnation += 1
        return self.incarnation

    def _again(self, every: float, fault: Callable[[], None]) -> None:
        def strike() -> None:
            if not self.calm:
                fault()
                self._again(every, fault)

        self.after(self.random.expovariate(1 / every), strike)

    # --- the network -----------------------------------------------------------------------------

    def deliver(self, receive: Callable[[Message], None], message: Message) -> None:
        """Sends a message, as badly as the adversary likes."""
        copies = 1
        delay = self.random.uniform(0.0002, 0.001)
        if not self.calm:
            if self.random.random() < self.faults.drop:
                copies = 0
                self.counts["dropped"] += 1
            elif self.random.random() < self.faults.double:
                copies = 2
                self.counts["doubled"] += 1
            if self.random.random() < self.faults.late:
                delay = self.random.uniform(0.01, 2.0)
                self.counts["late"] += 1
        for copy in range(copies):
            self.after(delay * (1 + copy), lambda: receive(message))

    # --- faults ----------------------------------------------------------------------------------

    def _kill_one(self) -> None:
        name = self.random.choice(sorted(self.workers))
        self.counts["kills"] += 1
        self.workers[name].die()
        rebirth = self.random.uniform(0.05, 4.0)
        self.after(rebirth, lambda: self._rebirth(name))

    def _rebirth(self, name: str) -> None:
        old = self.workers[name]
        if not old.alive:
            self.workers[name] = type(old)(self, name, old.num_blocks)

    def _freeze_one(self) -> None:
        self.counts["freezes"] += 1
        worker = self.workers[self.random.choice(sorted(self.workers))]
        worker.frozen_until = max(worker.frozen_until, self.now + self.random.uniform(0.5, 6.0))

    def _restart_coordinator(self) -> None:
        self.counts["coordinator restarts"] += 1
        for client in self.clients.values():
            if not client.ended and not client.cancelled:
                client.orphaned = True
        self.coordinator = self._new_coordinator()

    # --- the coordinator's shell -----------------------------------------------------------------

    def _new_coordinator(self) -> Lifecycle:
        limits = LifecycleLimits(max_attempts=30, max_deaths=30, max_queue=10**6, unserved_s=60.0)
        return Lifecycle(self.next_incarnation(), "hybrid", limits)

    def _coordinator_tick(self) -> None:
        self.carry_out(self.coordinator.tick(self.now))
        self.after(0.05, self._coordinator_tick)

    def to_coordinator(self, worker: tuple[str, int], message: Message) -> None:
        self.deliver(lambda m: self.carry_out(self.coordinator.receive(worker, m, self.now)), message)

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                shell = self.workers.get(action.worker[0])
                if shell is not None:
                    self.deliver(shell.from_coordinator(action.worker), action.message)
            elif isinstance(action, Push):
                self._seen(action.request.request_id, action.token)
            elif isinstance(action, End):
                self._ended(action.request.request_id, action.ended)

    def _seen(self, request_id: str, token: int) -> None:
        client = self.clients[request_id]
        client.tokens.append(token)
        at = len(client.tokens) - 1
        if client.ended:
            self.violations.append(f"{request_id}: a token after the end")
        if at >= len(client.expected) or client.expected[at] != token:
            self.violations.append(f"{request_id}: token {at} is wrong")

    def _ended(self, request_id: str, ended: Ended) -> None:
        client = self.clients[request_id]
        client.ended.append(ended)
        self.counts[f"ended: {ended.error or ended.finish_reason or 'cancelled'}"] += 1
        if len(client.ended) > 1:
            self.violations.append(f"{request_id}: ended twice")
        if ended.error in ("failed", "refused", "overloaded", "deadline"):
            self.violations.append(f"{request_id}: {ended.error}: {ended.message}")
        if ended.finish_reason is not None and (client.tokens != client.expected or ended.finish_reason != client.reason):
            self.violations.append(f"{request_id}: finished with {len(client.tokens)} of {len(client.expected)} tokens")

    # --- clients ---------------------------------------------------------------------------------

    def submit(self, number: int) -> None:
        """One request: some share long prefixes, lengths vary, some clients leave in the middle."""
        draw = self.random
        prefix = [1 + (draw.randrange(4) * 31 + i) % (VOCABULARY - 1) for i in range(draw.choice([0, 8, 30]))]
        prompt = prefix + [draw.randrange(1, VOCABULARY) for _ in range(draw.randint(1, 40))]
        max_tokens, ignore_eos = draw.randint(1, 30), draw.random() < 0.5
        expected, reason = expected_output(prompt, max_tokens, ignore_eos)
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
        request = GenerationRequest(f"r{number}", prompt, sampling, NullSink(), self.now, self.now + 600.0)
        client = self.clients[request.request_id] = Client(request, expected, reason)
        self.carry_out(self.coordinator.submit(request, self.now))
        if draw.random() < self.faults.cancel:
            self.after(draw.uniform(0.0, 0.4), lambda: self._leave(client))

    def _leave(self, client: Client) -> None:
        if not client.ended and not client.orphaned:
            client.cancelled = True
            self.carry_out(self.coordinator.cancel(client.request.request_id, self.now))

    def pending(self) -> list[Client]:
        return [c for c in self.clients.values() if not c.ended and not c.orphaned]

    def check_end(self) -> None:
        """After the faults have stopped and the clocks have run on: nothing is left over anywhere."""
        for client in self.pending():
            self.violations.append(f"{client.request.request_id}: never ended")
        for worker in self.workers.values():
            blocks = worker.blocks
            if blocks.num_used or blocks.num_free + blocks.num_cached != blocks.num_blocks:
                self.violations.append(f"{worker.name}: {blocks.num_used} blocks leaked")
        if self.coordinator.num_flights or self.coordinator.num_queued:
            self.violations.append("the coordinator still holds requests")
        for known in self.coordinator.pools.workers.values():
            if known.dispatches or known.pending or known.pending_blocks:
                self.violations.append(f"the coordinator still counts work for {known.hello.worker_id}")


class WorkerShell:
    """What both roles' processes have in common: an inbox, a step at a time, heartbeats; they die and freeze."""

    role: Any = ""

    def __init__(self, world: World, name: str, num_blocks: int) -> None:
        self.world, self.name, self.num_blocks = world, name, num_blocks
        self.incarnation = world.next_incarnation()
        self.process = self.incarnation  # survives a change of incarnation, not a restart
        self.blocks = BlockManager(num_blocks)
        self.memory = Memory(num_blocks, BLOCK_SIZE)
        self.alive, self.stepping, self.frozen_until = True, False, 0.0
        self._backlog: list[Callable[[], None]] = []
        self._thawing = False
        self.coordinator, self.said_hello = -1, -1e9
        self.core: Any = self.make_core()
        self._tick()

    def make_core(self) -> PrefillCore | DecodeCore:
        raise AssertionError

    def carry_out(self, action: object) -> None:
        raise AssertionError

    def rename(self) -> None:
        raise AssertionError

    @property
    def id(self) -> tuple[str, int]:
        return (self.name, self.incarnation)

    def die(self) -> None:
        self.alive = False
        for worker in self.world.workers.values():
            if isinstance(worker, DecodeShell):
                worker.writer_died(self)

    def when_awake(self, event: Callable[[], None]) -> None:
        """Runs the event in this process: never if it has died; if it is frozen, when it thaws, in the order of arrival."""
        if not self.alive:
            return
        if self.world.now < self.frozen_until or (self._backlog and not self._thawing):
            self._backlog.append(event)
            if len(self._backlog) == 1 and not self._thawing:
                self.world.after(self.frozen_until - self.world.now, self._thaw)
        else:
            event()

    def _thaw(self) -> None:
        if not self.alive:
            return
        self._thawing = True
        while self._backlog and self.world.now >= self.frozen_until:
            event, *rest = self._backlog
            self._backlog = []
            event()
            self._backlog += rest  # what the event left undone, being frozen again, comes first
        self._thawing = False
        if self._backlog:
            self.world.after(self.frozen_until - self.world.now, self._thaw)

    def from_coordinator(self, addressee: tuple[str, int]) -> Callable[[Message], None]:
        def receive(message: Message) -> None:
            if addressee == self.id:
                self.when_awake(lambda: self._on_coordinator(message))

        return receive

    def _on_coordinator(self, message: Message) -> None:
        if isinstance(message, Welcome):
            if message.coordinator < self.coordinator:
                return
            if message.coordinator != self.coordinator:
                self.coordinator = message.coordinator
                self.core.drop_others(message.coordinator)
            events = self.core.block_events(everything=True)
            self.world.to_coordinator(self.id, events)
        elif isinstance(message, Fenced):
            self.incarnation = self.world.next_incarnation()
            self.coordinator, self.said_hello = -1, -1e9
            self.rename()
        elif isinstance(self.core, PrefillCore):
            self.core.from_coordinator(message, self.world.now)
        else:
            self.core.from_coordinator(message)
        self.turn()

    def turn(self) -> None:
        """One turn of the worker's loop."""
        if not self.alive:
            return
        if not self.stepping:
            step = self.core.schedule(self.world.now)
            if step is not None:
                self.stepping = True
                duration = 0.002 + 0.0005 * step.batch.num_tokens
                self.world.after(duration, lambda: self.when_awake(lambda: self._step_done(step)))
        self.act()

    def act(self) -> None:
        for action in self.take():
            self.when_awake(lambda a=action, me=self.id: self._carry_out(a, me))  # type: ignore[misc]

    def _carry_out(self, action: object, me: tuple[str, int]) -> None:
        if isinstance(action, act.ToCoordinator):
            self.world.to_coordinator(me, action.message)
        else:
            self.carry_out(action)

    def take(self) -> list[Any]:
        raise AssertionError

    def _step_done(self, step: Any) -> None:
        """The step's reads and writes count as done at its end: blocks freed before it are a mistake that shows."""
        self.stepping = False
        self.core.complete(step, self.memory.execute(step.batch), self.world.now)
        self.turn()

    def _tick(self) -> None:
        if not self.alive:
            return
        self.world.after(HEARTBEAT / 2, lambda: self.when_awake(self._tick))
        self.core.tick(self.world.now)
        self.check()
        if self.coordinator < 0 and self.world.now - self.said_hello >= 1.0:
            self.said_hello = self.world.now
            self.world.to_coordinator(self.id, self.hello())
        else:
            self.world.to_coordinator(self.id, self.core.load())
            events = self.core.block_events()
            if events is not None:
                self.world.to_coordinator(self.id, events)
        self.turn()

    def check(self) -> None:
        """Invariants that hold after every tick."""
        blocks = self.blocks
        if blocks.num_free + blocks.num_cached + blocks.num_used != blocks.num_blocks:
            self.world.violations.append(f"{self.name}: blocks are not conserved")

    def hello(self) -> Hello:
        return Hello(
            worker_id=self.name,
            incarnation=self.incarnation,
            role=self.role,
            host="one",
            pid=self.process,
            model=MODEL,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCABULARY,
            num_blocks=self.num_blocks,
            max_num_seqs=8,
            max_batch_tokens=24,
        )


class PrefillShell(WorkerShell):
    role = "prefill"

    def meet(self) -> Meet:
        # By its name a worker uses the one-sided or the two-sided mover.
        movers = ("shm", "zmq") if self.name.endswith("0") else ("zmq",)
        return Meet(worker_id=self.name, incarnation=self.incarnation, host="one", pid=self.process, model=MODEL, movers=movers)

    def make_core(self) -> PrefillCore:
        self.movers: dict[tuple[str, int], tuple[str, DecodeShell]] = {}
        scheduler = PrefillScheduler(self.blocks, BLOCK_SIZE, MODEL.fingerprint, max_batch_tokens=24, max_num_seqs=4)
        return PrefillCore(self.meet(), scheduler, frozenset([EOS]), MAX_MODEL_LEN, HandoffTimes(resend=0.5, grant=20.0, ack=3.0))

    def rename(self) -> None:
        self.core.rename(self.meet())

    def take(self) -> list[Any]:
        return self.core.take()  # type: ignore[no-any-return]

    def carry_out(self, action: object) -> None:
        if isinstance(action, act.OpenMover):
            target = self.world.workers[action.peer[0]]
            assert isinstance(target, DecodeShell)
            if target.id == action.peer:  # else that process has died, and its memory with it
                self.movers[action.peer] = (action.met.mover, target)
        elif isinstance(action, act.ToPeer):
            self._send(action.peer, action.message)
        elif isinstance(action, act.Put):
            self._put(action)
        elif isinstance(action, act.SendPlaced):
            checksums = u64([self.memory.checksum(b) for b in action.source_blocks])
            self._send(action.peer, Placed(lease=action.lease, first=action.first, checksums=checksums))
        elif isinstance(action, act.SendHandoff):
            checksums = u64([self.memory.checksum(b) for b in action.source_blocks])
            handoff = Handoff(spec=action.spec, lease=action.lease, token=action.token, logprobs=action.logprobs, checksums=checksums)
            self._send(action.peer, handoff)

    def _send(self, peer: tuple[str, int], message: Message) -> None:
        sender = self.id
        shell = self.world.workers.get(peer[0])
        if isinstance(shell, DecodeShell):
            # The address belongs to the process: a new process or incarnation there gets what was meant for the old one.
            self.world.deliver(lambda m: shell.when_awake(lambda: shell.on_peer(sender, self, m)), message)

    def _put(self, put: act.Put) -> None:
        if put.peer not in self.movers:
            return
        mover, target = self.movers[put.peer]
        for position, source, block in put.items:
            content = list(self.memory.slots[source])
            if not self.world.calm and self.world.random.random() < self.world.faults.corrupt:
                content[0] ^= 1
                self.world.counts["corrupt puts"] += 1
            if mover == "shm":
                # One copy into the peer's memory, by this process. Frozen at this very moment, it copies when it wakes.
                if not self.world.calm and self.world.random.random() < self.world.faults.freeze_in_put:
                    self.world.counts["freezes in mid-put"] += 1
                    self.frozen_until = self.world.now + self.world.random.uniform(0.5, 8.0)
                self.when_awake(lambda c=content, b=block: target.written_by_peer(put.lease, b, c))  # type: ignore[misc]
            else:
                arrival = self.world.random.uniform(0.0002, 0.003)
                event = lambda c=content, p=position: target.on_put(put.lease, put.secret, p, c)  # noqa: E731
                self.world.after(arrival, lambda e=event: target.when_awake(e))  # type: ignore[misc]


class DecodeShell(WorkerShell):
    role = "decode"

    def make_core(self) -> DecodeCore:
        self.leases: dict[int, tuple[bytes, dict[int, int]]] = {}
        self.peers: dict[tuple[str, int], PrefillShell] = {}
        scheduler = DecodeScheduler(self.blocks, BLOCK_SIZE, 8, MAX_MODEL_LEN, frozenset([EOS]))
        self.receiver = HandoffReceiver(
            self.id,
            MODEL,
            self.blocks,
            MoverEndpoints(("shm", "zmq"), "one"),
            lambda: self.core.room(),
            lambda: self.world.random.randbytes(16),
            HandoffTimes(lease=1.5),
        )
        return DecodeCore(self.id, scheduler, self.receiver, MODEL.fingerprint)

    def rename(self) -> None:
        self.core.rename(self.incarnation)

    def check(self) -> None:
        super().check()
        for lease, expires in self.receiver.leases().items():
            if expires <= self.world.now:
                self.world.violations.append(f"{self.name}: lease {lease} outlives its deadline")

    def hello(self) -> Hello:
        return super().hello().model_copy(update={"peer_address": self.name})

    def take(self) -> list[Any]:
        return self.core.take(self.world.now)  # type: ignore[no-any-return]

    def on_peer(self, peer: tuple[str, int], shell: PrefillShell, message: Message) -> None:
        self.peers[peer] = shell
        self.core.from_peer(peer, message, self.world.now)
        self.turn()

    def carry_out(self, action: object) -> None:
        if isinstance(action, act.ToPeer):
            shell = self.peers.get(action.peer)
            if shell is not None:
                me = self.id
                self.world.deliver(lambda m: shell.when_awake(lambda: self._peer_hears(shell, action.peer, me, m)), action.message)
        elif isinstance(action, act.OpenLease):
            self.leases[action.lease] = (action.secret, action.targets)
        elif isinstance(action, act.CloseLease):
            self.leases.pop(action.lease, None)
        elif isinstance(action, act.Verify):
            pairs = zip(action.positions, action.blocks, action.checksums, strict=True)
            bad = [p for p, block, checksum in pairs if self.memory.checksum(block) != checksum]
            if bad:
                self.world.counts["corrupt blocks found"] += len(bad)
            self.core.receiver.verified(action.lease, action.positions, bad, self.world.now)
            self.act()

    def _peer_hears(self, shell: PrefillShell, addressee: tuple[str, int], me: tuple[str, int], message: Message) -> None:
        if shell.id == addressee:
            shell.core.from_peer(me, message, self.world.now)
            shell.turn()

    def on_put(self, lease: int, secret: bytes, position: int, content: list[int]) -> None:
        """A two-sided mover: this process itself writes, if the lease is open."""
        known = self.leases.get(lease)
        if known is None or known[0] != secret or position not in known[1]:
            self.world.counts["late puts dropped"] += 1
            return
        self.memory.slots[known[1][position]] = content
        self.core.receiver.arrived(lease, position)
        self.turn()

    def written_by_peer(self, lease: int, block: int, content: list[int]) -> None:
        """A one-sided mover: the memory changes, whatever this process thinks or does. Only while it lives, though."""
        if not self.alive:
            return
        if block not in self.receiver.blocks_open_to(lease):
            self.world.violations.append(f"{self.name}: block {block} was written under lease {lease}, which had ended")
        self.memory.slots[block] = content

    def writer_died(self, shell: WorkerShell) -> None:
        for peer, known in self.peers.items():
            if known is shell:
                self.when_awake(lambda p=peer: self._bury(p))  # type: ignore[misc]

    def _bury(self, peer: tuple[str, int]) -> None:
        self.core.receiver.writer_gone(peer)
        self.turn()


