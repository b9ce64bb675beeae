"""A cluster under virtual time: the real cores of all roles, with the latency model in place of the model runner.

To be read in this order: events.py, cluster.py (what is simulated), device.py (steps take their time), worker_shell.py with
prefill_shell.py and decode_shell.py, coordinator_shell.py, then records.py and tallies.py (what comes out). No core is written
again here. The same cluster, trace and seed give the same results bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from ...coordinator.steering.steering import Steering
from ...engine.block_manager import BlockManager
from ...engine.latency_profile import StepClock
from ...transport.messages import ModelIdentity, Role
from ..errors import SimulationError
from ..trace.request import Trace, TraceRequest
from .cluster import Cluster, Pool
from .coordinator_shell import CoordinatorShell
from .decode_shell import DecodeShell
from .device import Device, Noise
from .events import EventQueue
from .prefill_shell import PrefillShell
from .prompts import generation_request
from .records import RequestRecord
from .tallies import Slo, Tallies
from .timeline import Sample, Timeline, WorkerSample
from .worker_shell import WorkerShell

WARM_UP_S = 2.0
"""Virtual seconds before the trace begins: workers say hello."""
DEAD_AFTER_S = 0.3
"""A process's end is seen by its peers and the coordinator so much later."""


@dataclass(slots=True)
class _Machine:
    """One device and the workers on it."""

    pool: Pool
    device: Device
    noise: Noise
    shells: list[WorkerShell]

    def let_go(self, shell: WorkerShell) -> None:
        """It is of this worker's role no more."""
        self.shells.remove(shell)
        self.device.let_go(shell)


class Simulation:
    """``on_record`` hears of every request when it ends."""

    def __init__(
        self,
        cluster: Cluster,
        seed: int = 0,
        slo: Slo | None = None,
        on_record: Callable[[RequestRecord], None] | None = None,
        sample_s: float | None = None,
        heartbeat_s: float = 0.25,
        jumps: bool = True,
        steering: Steering | None = None,
    ) -> None:
        """``steering``: what it decides is done, where its mode is act. ``jumps``: equal decode steps are run many at once; without,
        the same comes out, and takes longer."""
        self.cluster, self.heartbeat_s = cluster, heartbeat_s
        self.queue = EventQueue()
        self.draw = random.Random(seed)
        self.tallies = Tallies(slo or Slo())
        self._on_record = on_record
        self._seed, self._jumps = seed, jumps
        self._numbers = count(1)
        self.workers: dict[str, WorkerShell] = {}
        self.decode_workers: dict[str, DecodeShell] = {}
        self.machines: list[_Machine] = []
        self.closely = False  # the coordinator hears of each step's tokens at once
        self.coordinator = CoordinatorShell(self, steering)
        self.clocks = [StepClock(pool.profile, warns=False) for pool in cluster.pools]
        for index, (pool, clock) in enumerate(zip(cluster.pools, self.clocks, strict=True)):
            for _ in range(pool.count):
                self._add_machine(pool, clock, index)
        self.timeline = Timeline([name for m in self.machines for name in (shell.name for shell in m.shells)], sample_s or 0.0)
        self._busy_before = [0.0] * len(self.machines)
        self._arriving = True
        self.num_arrived = self.num_ended = self.num_killed = 0
        self.began_at = self.queue.now + WARM_UP_S
        self._plan_failures()

    def next_number(self) -> int:
        """Incarnations."""
        return next(self._numbers)

    # --- running ---------------------------------------------------------------------------------

    def run(self, trace: Trace, until_s: float | None = None, give_up: Callable[[Tallies], bool] | None = None) -> Tallies:
        """Until every request has ended, or until ``until_s`` seconds of the trace, or until ``give_up`` says so (asked when a request
        ends). Raises SimulationError where nothing goes on any more."""
        requests = iter(trace)
        first = next(requests, None)
        if first is None:
            raise SimulationError(f"{trace.name} has no requests")
        self._arrive_at(first, requests, trace.block_size or 1, first.arrival_s, 0)
        if self.timeline.interval_s:
            self.queue.at(self.began_at, self._sample)
        stop_at = None if until_s is None else self.began_at + until_s

        def going_on() -> bool:
            if not self._arriving and not self.coordinator.open:
                return False
            return (stop_at is None or self.queue.now <= stop_at) and (give_up is None or not give_up(self.tallies))

        self.queue.run_while(going_on)
        return self.tallies

    @property
    def elapsed_s(self) -> float:
        """Virtual seconds since the trace began."""
        return self.queue.now - self.began_at

    def ended(self, record: RequestRecord) -> None:
        """A request is over."""
        self.num_ended += 1
        self.tallies.add(record)
        if self._on_record is not None:
            self._on_record(record)

    def _arrive_at(self, request: TraceRequest, rest: Iterator[TraceRequest], block_size: int, start_s: float, number: int) -> None:
        self.queue.at(self.began_at + request.arrival_s - start_s, self._arrive, request, rest, block_size, start_s, number)

    def _arrive(self, request: TraceRequest, rest: Iterator[TraceRequest], block_size: int, start_s: float, number: int) -> None:
        now = self.queue.now
        self.num_arrived += 1
        record = RequestRecord(number, request.arrival_s - start_s, now, request.num_prompt_tokens, request.num_output_tokens)
        made = generation_request(number, request, block_size, now, self.cluster.request_timeout_s)
        self.coordinator.open[made.request_id] = record
        self.queue.after(self.cluster.coordinator_s, self.coordinator.submit, made, record)
        following = next(rest, None)
        if following is None:
            self._arriving = False
        else:
            self._arrive_at(following, rest, block_size, start_s, number + 1)

    # --- machines --------------------------------------------------------------------------------

    def _add_machine(self, pool: Pool, clock: StepClock, index: int) -> None:
        number = sum(m.pool is pool for m in self.machines)
        name = f"{pool.role}-{index}-{number}"
        noise = Noise(f"{self._seed} {name}", pool.profile.noise_cv)
        machine = _Machine(pool, self._device(clock, noise), noise, [])
        self.machines.append(machine)
        self._start(machine, name)

    def _device(self, clock: StepClock, noise: Noise) -> Device:
        return Device(self.queue, clock, noise, self.tallies.of["gap"], self._jumps)

    def _model_of(self, pool: Pool, kind: str) -> ModelIdentity:
        memory = pool.profile.memory
        return ModelIdentity(
            fingerprint=kind, dtype="simulated", block_size=memory.block_size, layout="simulated", block_bytes=memory.block_bytes
        )

    def _start(self, machine: _Machine, name: str) -> None:
        pool = machine.pool
        model = self._model_of(pool, "shared" if pool.role != "colocated" else name)  # a colocated worker hands over to itself alone
        for_prompts = max(2, int(pool.blocks * pool.prefill_share)) if pool.role == "colocated" else pool.blocks
        if pool.flexible:
            self._begin(machine, name, "prefill" if pool.role == "prefill" else "decode", None)
            return
        if pool.role != "decode":
            machine.shells.append(
                PrefillShell(self, f"{name}-p" if pool.role == "colocated" else name, pool, for_prompts, model, machine.device)
            )
        if pool.role != "prefill":
            num_blocks = pool.blocks - for_prompts if pool.role == "colocated" else pool.blocks
            decode = DecodeShell(self, f"{name}-d" if pool.role == "colocated" else name, pool, num_blocks, model, machine.device)
            machine.shells.append(decode)
            self.decode_workers[decode.name] = decode
        for shell in machine.shells:
            self.workers[shell.name] = shell
            shell.start()

    def flip(self, shell: WorkerShell, role: Role) -> bool:
        """The process of this worker is also one of the other role from now on. False: its worker of that role is still leaving."""
        machine = next(m for m in self.machines if shell in m.shells)
        present = next((other for other in machine.shells if other.role == role), None)
        if present is None:
            self._begin(machine, shell.process, role, shell.core.blocks)
        return present is None or not present.core.drains

    def _begin(self, machine: _Machine, process: str, role: Role, blocks: BlockManager | None) -> None:
        kind = PrefillShell if role == "prefill" else DecodeShell
        pool, model = machine.pool, self._model_of(machine.pool, "shared")
        shell = kind(self, f"{process}:{role}", pool, pool.blocks, model, machine.device, blocks=blocks)
        shell.process = process
        machine.shells.append(shell)
        self.workers[shell.name] = shell
        if isinstance(shell, DecodeShell):
            self.decode_workers[shell.name] = shell
        self.queue.after(pool.profile.flip_s or 0.0, shell.start)

    def restart(self, shell: WorkerShell, down_s: float) -> None:
        """Its machine's processes end now and start again after ``down_s``."""
        machine = next(m for m in self.machines if shell in m.shells)
        names = {
            s.process or s.name.removesuffix("-p").removesuffix("-d") if s.process or machine.pool.role == "colocated" else s.name
            for s in machine.shells
        }
        for dead in machine.shells:
            dead.die()
            del self.workers[dead.name]
            self.decode_workers.pop(dead.name, None)
            self.queue.after(DEAD_AFTER_S, self._seen_dead, dead.id)
        machine.shells = []
        machine.device.stop()
        machine.device = self._device(self.clocks[self.cluster.pools.index(machine.pool)], machine.noise)
        self.queue.after(down_s, self._start, machine, names.pop())

    def left(self, shell: WorkerShell) -> None:
        """It has drained, and ended in good order."""
        shell.alive = False
        if shell.process:
            next(m for m in self.machines if shell in m.shells).let_go(shell)
        self.workers.pop(shell.name, None)
        self.decode_workers.pop(shell.name, None)

    def look_closely(self, closely: bool) -> None:
        """From now on the coordinator hears of each decode step at once, or does not need to."""
        began, self.closely = closely and not self.closely, closely
        if began:
            for decode in self.decode_workers.values():
                decode.tell_tokens()

    def _seen_dead(self, worker: tuple[str, int]) -> None:
        for decode in self.decode_workers.values():
            decode.peer_died(worker)
        self.coordinator.worker_ended(worker)

    def _plan_failures(self) -> None:
        for failure in self.cluster.failures:
            if failure.worker not in self.workers:
                raise SimulationError(f"there is no worker {failure.worker} to fail; there are {', '.join(list(self.workers)[:8])} ...")
            self.queue.at(self.began_at + failure.at_s, self._fail, failure.worker)
        if self.cluster.mean_seconds_between_failures is not None:
            for machine in self.machines:
                self._fail_again(machine)

    def _fail_again(self, machine: _Machine) -> None:
        mean = self.cluster.mean_seconds_between_failures
        assert mean is not None
        self.queue.after(WARM_UP_S + self.draw.expovariate(1 / mean), self._fail_machine, machine)

    def _fail_machine(self, machine: _Machine) -> None:
        if machine.shells:
            self._fail(machine.shells[0].name)
        self._fail_again(machine)

    def _fail(self, name: str) -> None:
        shell = self.workers.get(name)
        if shell is not None:
            self.num_killed += 1
            self.restart(shell, shell.pool.profile.start_s)

    # --- looking ---------------------------------------------------------------------------------

    def _sample(self) -> None:
        self.queue.after(self.timeline.interval_s, self._sample)
        workers, interval = [], self.timeline.interval_s
        for machine in self.machines:
            machine.device.catch_up()
        for index, machine in enumerate(self.machines):
            busy = (machine.device.busy_s - self._busy_before[index]) / interval
            self._busy_before[index] = machine.device.busy_s
            workers += [_sample_of(shell, min(max(busy, 0.0), 1.0)) for shell in machine.shells[-1 if machine.pool.flexible else 0 :]] or [
                WorkerSample(0, 0, 0.0, 0.0, 0.0)
            ]
        core = self.coordinator.core
        self.timeline.add(Sample(self.elapsed_s, core.num_queued, core.num_flights, self.num_arrived, self.num_ended, tuple(workers)))


def _sample_of(shell: WorkerShell, busy: float) -> WorkerSample:
    blocks = shell.core.blocks
    load = shell.core.load()
    return WorkerSample(
        load.num_running, load.num_waiting, blocks.num_used / blocks.num_blocks, blocks.num_cached / blocks.num_blocks, busy
    )
