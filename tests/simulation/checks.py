"""The invariants that no single event shows: looked at after some ticks of each process, thoroughly now and
then, and at the end.

What one event can break is checked where it happens: tokens and ends in clients.py, writes and reuse of
blocks in watched_blocks.py and worker_role.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

from simulation.builds import FAR
from simulation.faults import Faults
from simulation.worker_process import TICK_S

from splitserve.decode.core import DecodeCore

if TYPE_CHECKING:
    from simulation.coordinator_process import CoordinatorProcess
    from simulation.worker_role import WorkerRole
    from simulation.world import World


SIGNS_OF_LOSS = ("the workers hold nothing of it", "was lost on the way")
"""In the reason for which a request is dispatched again."""


class Checks:
    """Each finding goes to ``world.violated``."""

    def __init__(self, world: World) -> None:
        self.world = world

    def look(self, worker: WorkerRole) -> None:
        """Nothing waits beyond its announced deadline and the next tick."""
        for wait in worker.core.waits():
            if not worker.now - TICK_S < wait.until < inf:
                self.world.violated(
                    f"{worker.name}: {wait.key} waits for {wait.what} until {wait.until}, and it "
                    f"is {worker.now}"
                )
        if worker.reach_check is not None:
            worker.reach_check.look()

    def look_at_coordinator(self, coordinator: CoordinatorProcess) -> None:
        """Every client that waits is known, and its wait ends."""
        coordinator.sends.look()
        coordinator.processes.look()
        self.world.clients.look(coordinator)
        requests = coordinator.core.requests
        if set(requests) != {
            i for i, c in self.world.clients.pending.items() if c.coordinator is coordinator
        }:
            self.world.violated("the coordinator and the clients do not agree on who waits")
        for request in requests.values():
            if not coordinator.ticked_at < request.deadline < inf:
                self.world.violated(
                    f"{coordinator.name}: {request.request_id} is late in {request.state} at "
                    f"{coordinator.ticked_at}"
                )

    def at_rest(self) -> bool:
        """Faults have stopped: is everybody done, and has everybody let go?"""
        world = self.world
        return not world.clients.pending and not any(True for _ in self.left_over())

    def _done_again(self) -> dict[str, int]:
        """Requests given back and computed anew, by reason, and workers taken for dead; not for want of
        memory, nor for a grammar that does not compile."""
        counts, fair = self.world.counts, ("given back: preempted", "given back: refused")
        wrong = ("given back", "fenced by one of several")
        return {what: counts[what] for what in counts if what.startswith(wrong) and what not in fair}

    def left_over(self) -> Iterable[str]:
        """What should not be there once everybody is done."""
        world = self.world
        for worker in world.workers.values():
            if not worker.awake:
                yield f"{worker.name} is dead or frozen"
            elif worker.played.departure.has_begun:
                yield f"{worker.name} leaves"
            elif worker.blocks.num_used:
                yield f"{worker.name}: {worker.blocks.num_used} blocks are in use"
            elif isinstance(worker.core, DecodeCore) and worker.core.answers._complete:
                yield f"{worker.name} keeps answers"
            elif list(worker.core.waits()):
                yield f"{worker.name}: waits for {next(iter(worker.core.waits()))}"
        for process in self.world.processes.values():
            if not process.alive:
                yield f"{process.name} is dead"
            elif process.num_retiring:
                yield f"a role of {process.name} is over, and not everybody has heard it"
            elif problem := process.adapters.problem:
                yield f"{process.name} {problem}"
        for coordinator in self.world.coordinators.values():
            yield from self._left_at(coordinator)
        refused = [set(each.core.refused(each.now)) for each in world.coordinators.values()]
        if {w.name for w in world.workers.values() if w.process.build == FAR} != set[str]().union(*refused):
            yield f"for their wire version are refused {refused}"

    def _left_at(self, coordinator: CoordinatorProcess) -> Iterable[str]:
        name, core = coordinator.name, coordinator.core
        if not coordinator.awake:
            yield f"{name} is dead or frozen"
        if core.requests or len(core.queue):
            yield f"{name} holds {len(core.requests)} requests"
        workers = self.world.workers.values()
        if {w.id for w in workers if w.process.build != FAR} != set(core.pools.workers):
            yield f"{name} knows {sorted(core.pools.workers)}"
        for worker_id in coordinator.processes.left():
            yield f"{name} watches the process of {worker_id[0]}, which it does not know"
        for known in core.pools.workers.values():
            if known.dispatches or known.pending or known.pending_blocks:
                yield f"{name} counts work for {known.hello.worker_id}"
            if known.answers:
                yield f"{name} believes that {known.hello.worker_id} keeps answers"
            if known.drain is not None:
                yield f"{name} tells {known.hello.worker_id} to leave, which has not said that it does"

    def at_end(self) -> None:
        """At rest for a while: nothing is left over, and the coordinator knows what is really cached
        where."""
        for client in self.world.clients.pending.values():
            self.world.violated(f"{client.request.request_id}: never ended")
        for what in self.left_over():
            self.world.violated(f"at the end: {what}")
        if self.world.scenario.faults == Faults() and (again := self._done_again()):
            self.world.violated(f"without any fault: {again}")
        for worker in self.world.workers.values():
            worker.process.audit()
            if worker.blocks.num_free + worker.blocks.num_cached != worker.num_blocks:
                self.world.violated(f"{worker.name}: {worker.blocks.num_used} blocks leaked")
            cached = set(worker.blocks.cached_hashes())
            for coordinator in self.world.coordinators.values():
                known = coordinator.core.pools.workers.get(worker.id)
                if known is not None and known.cached != cached:
                    self.world.violated(f"{coordinator.name} does not know what {worker.name} has cached")
                if known is not None and known.adapters != worker.process.adapters.slots.reported:
                    self.world.violated(f"{coordinator.name} does not know the adapters of {worker.name}")
        self._check_others_work()
        self._check_communicators()

    def _check_communicators(self) -> None:
        """If every message arrives, in order, no end of a communicator outlives the other."""
        faults = self.world.scenario.faults
        if faults.drop or faults.mangle or faults.late or faults.double or faults.partition_every:
            return
        for worker in self.world.workers.values():
            if worker.rendezvous is not None:
                for session in worker.rendezvous.left_over():
                    self.world.violated(
                        f"{worker.name}: the communicator with {session.peer[0]} was never torn down"
                    )

    def _check_others_work(self) -> None:
        """If the only faults are coordinators that die and clients that leave, no other request is computed
        twice: one coordinator's end, or its forgetting a worker, does not concern the others. Nor is a
        resumed answer."""
        faults = self.world.scenario.faults
        if faults != Faults(coordinator_restart_every=faults.coordinator_restart_every, cancel=faults.cancel):
            return
        for coordinator in self.world.coordinators.values():
            lost = [
                why
                for why in coordinator.core.outcomes.last_retries
                if any(sign in why for sign in SIGNS_OF_LOSS)
                and (coordinator.name not in self.world.restarted or "+ in " in why)
            ]
            if lost:
                self.world.violated(
                    f"{coordinator.name}, for nothing that befell it, had to dispatch again: {lost[0]}"
                )
