"""A cluster under virtual time: the coordinator's dispatcher and the worker's loop as they ship, with a
latency profile in place of the model.

Read in this order: events.py, cluster.py (what is simulated), device.py and host.py (steps take their time),
channels.py and link.py (messages and KV blocks take theirs), process.py, coordinator.py, then records.py and
tallies.py (the results). The same cluster, trace and seed give the same results bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import count

from ...coordinator.dispatcher import LAST_MESSAGES_S
from ...engine.step_clock import StepClock
from ...steering.steering import Steering
from ...traces.request import Trace, TraceRequest
from ...transport.process.heap import collapse_heap, seldom_collected
from ..errors import SimulationError
from .channels import Fabric
from .cluster import Cluster, Pool
from .coordinator import Coordinator
from .device import Device, Noise, Pace
from .events import EventQueue
from .host import Host
from .machine import SimulatedMachine
from .process import SimulatedProcess, SimulatedRole
from .prompts import generation_request
from .records import RequestRecord
from .slo import Slo
from .tallies import Tallies
from .timeline import Sample, Timeline

WARM_UP_S = 2.0
"""Virtual seconds before the trace begins: workers send Hello."""
COLLAPSE_EVERY = 1000
"""Arrivals between two looks at what has come to the heap."""
DEAD_AFTER_S = 0.3
"""Seconds after the end of a process at which the coordinator has removed it."""


class Simulation:
    """One simulated cluster. ``on_record`` is called with every request that ends."""

    def __init__(
        self,
        cluster: Cluster,
        seed: int = 0,
        slo: Slo | None = None,
        on_record: Callable[[RequestRecord], None] | None = None,
        sample_s: float | None = None,
        jumps: bool = True,
        steering: Steering | None = None,
        pace: Pace | None = None,
    ) -> None:
        """``pace``: of all machines, at each second of the trace, in place of their profiles' noise.
        ``steering``: what it decides is done, where its mode is act. ``jumps``: skip layers that nothing
        waits for and idle heartbeats; without, the results are the same."""
        self.cluster = cluster
        self.queue = EventQueue()
        self.draw = random.Random(seed)
        self.tallies = Tallies(slo or Slo())
        self._on_record = on_record
        self._seed, self._jumps, self._pace = seed, jumps, pace
        self.next_number = partial(next, count(1))
        self.workers: dict[str, SimulatedRole] = {}  # that live, by name
        self.fabric = Fabric()
        self.machines: list[SimulatedMachine] = []
        self._hosts = [Host(self.queue) for _ in range(cluster.num_hosts)]
        self.coordinator = Coordinator(self, steering)
        self.clocks = [StepClock(pool.profile, warns=False) for pool in cluster.pools]
        for index, (pool, clock) in enumerate(zip(cluster.pools, self.clocks, strict=True)):
            for _ in range(pool.count):
                self._add_machine(pool, clock, index)
        self.timeline = Timeline(
            [role.name for machine in self.machines for role in machine.roles], sample_s or 0.0
        )
        self._arriving = True
        self.num_arrived = self.num_ended = self.num_killed = 0
        self.arrival_span_s = 0.0  # from the first arrival to the last
        self.began_at = self.queue.now + WARM_UP_S
        self._plan_failures()

    # --- running ---------------------------------------------------------------------------------

    def run(self, trace: Trace, give_up: Callable[[], bool] = lambda: False) -> Tallies:
        """Run until every request has ended, or until ``give_up`` returns True (asked after each event).
        Raises SimulationError where nothing goes on any more."""
        requests = iter(trace)
        first = next(requests, None)
        if first is None:
            raise SimulationError(f"{trace.name} has no requests")
        self._coming, self._block_size, self._start_s = requests, trace.block_size or 1, first.arrival_s
        self._await(first)
        if self.timeline.interval_s:
            self.queue.at(self.began_at, self._sample)

        def going_on() -> bool:
            return bool(self._arriving or self.coordinator.open) and not give_up()

        with seldom_collected():
            self.queue.run_while(going_on)
        return self.tallies

    @property
    def goodput_per_s(self) -> float | None:
        """Good requests a second of the time in which requests arrived; None where all came at once."""
        return self.tallies.num_good / self.arrival_span_s if self.arrival_span_s else None

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

    def _await(self, request: TraceRequest) -> None:
        self.queue.at(self.began_at + request.arrival_s - self._start_s, self._arrive, request)

    def _arrive(self, request: TraceRequest) -> None:
        now, number = self.queue.now, self.num_arrived
        if number % COLLAPSE_EVERY == 0:
            collapse_heap()
        self.num_arrived += 1
        self.arrival_span_s = now - self.began_at
        arrival_s = request.arrival_s - self._start_s
        record = RequestRecord(number, arrival_s, now, request.num_prompt_tokens, request.num_output_tokens)
        timeout_s, longest = self.cluster.request_timeout_s, self.coordinator.core.pools.max_sequence_tokens
        made = generation_request(number, request, self._block_size, now, timeout_s, longest)
        self.coordinator.open[made.request_id] = record
        self.queue.after(self.cluster.coordinator_s, self.coordinator.submit, made, record)
        following = next(self._coming, None)
        if following is None:
            self._arriving = False
        else:
            self._await(following)

    # --- machines --------------------------------------------------------------------------------

    def _add_machine(self, pool: Pool, clock: StepClock, index: int) -> None:
        number = sum(m.pool is pool for m in self.machines)
        name = f"{pool.role}-{index}-{number}"
        noise, gaps = Noise(f"{self._seed} {name}", pool.profile.noise_cv), self.tallies.of["gap"]
        shares = self.cluster.workers_per_host > 1 and pool.profile.contention is not None
        beside = self._hosts[len(self.machines) % len(self._hosts)] if shares else None
        paced = self._pace
        pace = None if paced is None else (lambda role, now: paced(role, now - self.began_at))
        new_device = partial(Device, self.queue, clock, noise, gaps, self._jumps, beside, pace)
        machine = SimulatedMachine(name, pool, new_device, new_device())
        self.machines.append(machine)
        self._start(machine)

    def _start(self, machine: SimulatedMachine) -> None:
        machine.process = SimulatedProcess(self, machine.name, machine.pool, machine.device)

    def _fail(self, machine: SimulatedMachine) -> None:
        """Its process ends now, and starts again after the time that a start takes."""
        if machine.process is None:
            return
        self.num_killed += 1
        for role in machine.roles:
            self.queue.after(DEAD_AFTER_S - LAST_MESSAGES_S, self.coordinator.worker_ended, role.id)
        machine.process.die()
        machine.process, machine.device = None, machine.new_device()
        self.queue.after(machine.pool.profile.start_s, self._start, machine)

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
