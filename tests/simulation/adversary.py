"""What befalls processes: it strikes at random times until the world is calm."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.worker_process import WorkerProcess
    from simulation.world import World


class Adversary:
    """Kills, freezes, hangs, slows down, cuts off and spills; how often is the scenario's."""

    def __init__(self, world: World) -> None:
        self.world, self.random, self.counts = world, world.random, world.counts
        faults = world.scenario.faults
        for every, strike in (
            (faults.kill_every, self.kill),
            (faults.freeze_every, self.freeze),
            (faults.hang_every, self.hang),
            (faults.slow_every, self.slow_down),
            (faults.partition_every, self.partition),
            (faults.drain_every, self.drain),
            (faults.spill_every, self.spill),
            (faults.coordinator_restart_every, self.restart_coordinator),
            (faults.coordinator_freeze_every, self.freeze_coordinator),
            (faults.flip_every, self.flip),
            (faults.lend_every, self.lend),
            (faults.clock_jump_every, self.set_a_clock),
            (faults.adapters_change_every * bool(world.scenario.cluster.adapters), world.folder.change),
        ):
            if every:
                self._again(every, strike)

    def _again(self, every: float, strike: Callable[[], None]) -> None:
        self.world.queue.after(self.random.expovariate(1 / every), self._strike, every, strike)

    def _strike(self, every: float, strike: Callable[[], None]) -> None:
        if not self.world.calm:
            strike()
            self._again(every, strike)

    def _some_worker(self) -> str:
        return self.random.choice(sorted(self.world.workers))

    def _some_process(self) -> WorkerProcess:
        return self.world.workers[self._some_worker()].process

    def _some_seconds(self) -> float:
        """Draw 0.1 to 3 seconds: shorter and longer than the patience of any part."""
        return 0.1 * 30.0 ** self.random.random()

    def kill(self) -> None:
        process = self._some_process()
        if process.alive:
            self.counts["kills"] += 1
            self.world.kill(process)

    def freeze(self) -> None:
        self.counts["freezes"] += 1
        self._some_process().freeze(self._some_seconds())

    def hang(self) -> None:
        """Longer than the coordinator's patience with a busy worker, or shorter."""
        self.counts["hangs"] += 1
        worker = self.world.workers[self._some_worker()]
        worker.process.hung_until = self.world.queue.now + 2 * self._some_seconds()
        self.world.struck[worker.id] += 1

    def slow_down(self) -> None:
        self.counts["slow workers"] += 1
        self._some_process().slow_until = self.world.queue.now + self._some_seconds()

    def partition(self) -> None:
        """Between any two processes, one way or both."""
        one, other = self.random.sample([*sorted(self.world.workers), *self.world.coordinator_names], 2)
        self.world.struck.update(
            self.world.workers[name].id for name in (one, other) if name in self.world.workers
        )
        seconds, holds = self._some_seconds(), self.random.random() < 0.5
        self.world.network.cut(one, other, seconds, holds)
        if self.random.random() < 0.5:
            self.counts["partitions"] += 1
            self.world.network.cut(other, one, seconds, holds)
        else:
            self.counts["one-way partitions"] += 1

    def drain(self) -> None:
        """By a signal, or by a person's word to the coordinator."""
        worker = self.world.workers[self._some_worker()]
        if self.random.random() < 0.5:
            self.counts["drains by signal"] += 1
            worker.process.leave()
        else:
            self.counts["drains by the coordinator"] += 1
            coordinator = self.world.some_coordinator()
            coordinator.run(coordinator.dispatcher.drain, worker.name, self.random.choice((None, 0.3)))

    def flip(self) -> None:
        """Order a flip, as an operator or the pool controller does; the coordinator may refuse it."""
        if flexible := sorted(name for name, process in self.world.processes.items() if process.flexible):
            coordinator, process = self.world.some_coordinator(), self.random.choice(flexible)
            role = self.random.choice(("prefill", "decode"))
            coordinator.run(coordinator.flip, process, role, self.random.choice((None, 0.3)))

    def lend(self) -> None:
        """Forbid or allow what the pool controller does: that decode workers borrow prompts."""
        self.counts["borrowing forbidden or allowed"] += 1
        coordinator = self.world.some_coordinator()
        coordinator.run(coordinator.dispatcher.lend_decode, self.random.random() < 0.5)

    def set_a_clock(self) -> None:
        """Set one host's clock forward or back."""
        self.counts["clocks set"] += 1
        self.world.hosts[self.random.choice(sorted(self.world.hosts))].jump()

    def spill(self) -> None:
        self.counts["spills"] += 1
        self._some_process().blocks.spill()

    def restart_coordinator(self) -> None:
        if (coordinator := self.world.some_coordinator()).alive:
            self.counts["coordinator restarts"] += 1
            self.world.restart_coordinator(coordinator, after=self._some_seconds() / 2)

    def freeze_coordinator(self) -> None:
        self.counts["coordinator freezes"] += 1
        self.world.some_coordinator().freeze(self._some_seconds() / 2)
