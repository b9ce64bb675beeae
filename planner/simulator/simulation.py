"""A cluster under virtual time: the real cores of all roles, with the latency model in place of the model
runner.

To be read in this order: events.py, cluster.py (what is simulated), device.py and host.py (steps take their
time), worker_shell.py with prefill_shell.py and decode_shell.py, coordinator.py, then records.py and
tallies.py (what comes out). No core is written again here. The same cluster, trace and seed give the same
results bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from ...coordinator.dispatcher import LAST_MESSAGES_S
from ...engine.cache.block_manager import BlockManager
from ...engine.latency_profile import StepClock
from ...steering.steering import Steering
from ...transport.process.collector import seldom_collected
from ...transport.process.huge_heap import collapse_heap
from ...worker.roles import RoleHost, worker_name
from ..errors import SimulationError
from ..trace.request import Trace, TraceRequest
from .cluster import Cluster, Pool
from .coordinator import Coordinator
from .decode_shell import DecodeShell
from .device import Device, Noise, Pace
from .events import EventQueue
from .host import Host
from .machine import SimulatedMachine
from .prefill_shell import PrefillShell
from .prompts import generation_request
from .records import RequestRecord
from .tallies import Slo, Tallies
from .timeline import Sample, Timeline
from .worker_shell import WorkerShell

WARM_UP_S = 2.0
"""Virtual seconds before the trace begins: workers send Hello."""
BOTH = ("decode", "prefill")
"""The roles of a colocated worker, in the order in which a live mixed one begins them."""
COLLAPSE_EVERY = 1000
"""Arrivals between two looks at what has come to the heap."""
DEAD_AFTER_S = 0.3
"""Seconds after the end of a process at which its peers see it and the coordinator has removed it."""


class Simulation:
    """One simulated cluster. ``on_record`` is called with every request that ends."""

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
        pace: Pace | None = None,
    ) -> None:
        """``pace``: of all machines, at each second of the trace, in place of their profiles' noise.
        ``steering``: what it decides is done, where its mode is act. ``jumps``: skip layers that nothing
        waits for and idle heartbeats; without, the results are the same."""
        self.cluster, self.heartbeat_s = cluster, heartbeat_s
        self.queue = EventQueue()
        self.draw = random.Random(seed)
        self.tallies = Tallies(slo or Slo())
        self._on_record = on_record
        self._seed, self._jumps, self._pace = seed, jumps, pace
        self.next_number = partial(next, count(1))  # of incarnations
        self.workers: dict[str, WorkerShell] = {}
        self.decode_workers: dict[str, DecodeShell] = {}
        self.machines: list[SimulatedMachine] = []
        self._hosts = [Host(self.queue) for _ in range(cluster.num_hosts)]
        self.coordinator = Coordinator(self, steering)
        self.clocks = [StepClock(pool.profile, warns=False) for pool in cluster.pools]
        for index, (pool, clock) in enumerate(zip(cluster.pools, self.clocks, strict=True)):
            for _ in range(pool.count):
                self._add_machine(pool, clock, index)
        self.timeline = Timeline(
            [name for m in self.machines for name in (shell.name for shell in m.shells)], sample_s or 0.0
        )
        self._arriving = True
        self.num_arrived = self.num_ended = self.num_killed = 0
        self.arrival_span_s = 0.0  # from the first arrival to the last
        self.began_at = self.queue.now + WARM_UP_S
        self._plan_failures()

    # --- running ---------------------------------------------------------------------------------

    def run(
        self, trace: Trace, until_s: float | None = None, give_up: Callable[[Tallies], bool] | None = None
    ) -> Tallies:
        """Run until every request has ended, until ``until_s`` seconds of the trace, or until ``give_up``
        returns True (asked after each event). Raises SimulationError where nothing goes on any more."""
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
            return (stop_at is None or self.queue.now <= stop_at) and (
                give_up is None or not give_up(self.tallies)
            )

        with seldom_collected():
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

    def _arrive_at(
        self,
        request: TraceRequest,
        rest: Iterator[TraceRequest],
        block_size: int,
        start_s: float,
        number: int,
    ) -> None:
        self.queue.at(
            self.began_at + request.arrival_s - start_s,
            self._arrive,
            request,
            rest,
            block_size,
            start_s,
            number,
        )

    def _arrive(
        self,
        request: TraceRequest,
        rest: Iterator[TraceRequest],
        block_size: int,
        start_s: float,
        number: int,
    ) -> None:
        now = self.queue.now
        if self.num_arrived % COLLAPSE_EVERY == 0:
            collapse_heap()
        self.num_arrived += 1
        self.arrival_span_s = now - self.began_at
        record = RequestRecord(
            number, request.arrival_s - start_s, now, request.num_prompt_tokens, request.num_output_tokens
        )
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
        shares = self.cluster.workers_per_host > 1 and pool.profile.contention is not None
        beside = self._hosts[len(self.machines) % len(self._hosts)] if shares else None
        machine = SimulatedMachine(name, pool, self._device(clock, noise, beside), noise, beside)
        self.machines.append(machine)
        self._start(machine)

    def _device(self, clock: StepClock, noise: Noise, beside: Host | None) -> Device:
        paced = self._pace
        pace = None if paced is None else (lambda role, now: paced(role, now - self.began_at))
        return Device(self.queue, clock, noise, self.tallies.of["gap"], self._jumps, beside, pace)

    def _start(self, machine: SimulatedMachine) -> None:
        pool, device = machine.pool, machine.device
        mixed = pool.role == "colocated"
        if mixed or pool.flexible:
            blocks = BlockManager(pool.blocks)
            machine.host = RoleHost(
                machine.name,
                blocks,
                lambda role: self._begin(machine, role),
                self.next_number,
                mixed=mixed,
                for_decode=lambda: device.num_growing_blocks,
            )
        for role in BOTH if mixed else (pool.role,):
            self._begin(machine, role)

    def _begin(self, machine: SimulatedMachine, role: str) -> bool:
        """It is of this role from now on. False: it has not quite ended being so, and cannot begin again
        yet."""
        present = next((shell for shell in machine.shells if shell.role == role), None)
        if present is not None:
            return not present.core.drains
        kind = PrefillShell if role == "prefill" else DecodeShell
        name = worker_name(machine.name, role) if machine.host else machine.name
        shell = kind(self, name, machine.pool, machine.device, machine.host)
        machine.shells.append(shell)
        self.workers[shell.name] = shell
        if isinstance(shell, DecodeShell):
            self.decode_workers[shell.name] = shell
        shell.start()
        return True

    def restart(self, shell: WorkerShell, down_s: float) -> None:
        """Its machine's processes end now and start again after ``down_s``."""
        self._restart(self._machine_of(shell), down_s)

    def _restart(self, machine: SimulatedMachine, down_s: float) -> None:
        for dead in machine.shells:
            dead.die()
            del self.workers[dead.name]
            self.decode_workers.pop(dead.name, None)
            self.queue.after(DEAD_AFTER_S, self._seen_dead, dead.id)
            self.queue.after(DEAD_AFTER_S - LAST_MESSAGES_S, self.coordinator.worker_ended, dead.id)
        machine.shells = []
        machine.device.stop()
        clock = self.clocks[self.cluster.pools.index(machine.pool)]
        machine.device = self._device(clock, machine.noise, machine.beside)
        self.queue.after(down_s, self._start, machine)

    def _machine_of(self, shell: WorkerShell) -> SimulatedMachine:
        return next(m for m in self.machines if shell in m.shells)

    def left(self, shell: WorkerShell) -> None:
        """It has drained, and ended in good order."""
        self._machine_of(shell).remove(shell)
        self.workers.pop(shell.name, None)
        self.decode_workers.pop(shell.name, None)

    def _seen_dead(self, worker: tuple[str, int]) -> None:
        for decode in self.decode_workers.values():
            decode.peer_died(worker)

    def _plan_failures(self) -> None:
        machines = {machine.name: machine for machine in self.machines}
        for failure in self.cluster.failures:
            if failure.worker not in machines:
                raise SimulationError(
                    f"there is no worker {failure.worker} to fail; there are "
                    f"{', '.join(list(machines)[:8])} ..."
                )
            self.queue.at(self.began_at + failure.at_s, self._fail, machines[failure.worker])
        if self.cluster.mean_seconds_between_failures is not None:
            for machine in self.machines:
                self._fail_again(machine)

    def _fail_again(self, machine: SimulatedMachine) -> None:
        mean = self.cluster.mean_seconds_between_failures
        assert mean is not None
        self.queue.after(WARM_UP_S + self.draw.expovariate(1 / mean), self._fail_machine, machine)

    def _fail_machine(self, machine: SimulatedMachine) -> None:
        self._fail(machine)
        self._fail_again(machine)

    def _fail(self, machine: SimulatedMachine) -> None:
        if machine.shells:  # else it is down already
            self.num_killed += 1
            self._restart(machine, machine.pool.profile.start_s)

    # --- looking ---------------------------------------------------------------------------------

    def _sample(self) -> None:
        self.queue.after(self.timeline.interval_s, self._sample)
        workers = [one for machine in self.machines for one in machine.sample(self.timeline.interval_s)]
        core = self.coordinator.core
        self.timeline.add(
            Sample(
                self.elapsed_s,
                len(core.queue),
                len(core.requests),
                self.num_arrived,
                self.num_ended,
                tuple(workers),
            )
        )
