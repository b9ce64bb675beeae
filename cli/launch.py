"""``splitserve up --on slurm`` and ``--on ray``: starts what is missing, stops what is too much, waits
until the cluster serves."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from ..coordinator.http.access.url import url_of
from ..deploy.child_process import Command
from ..deploy.errors import LaunchError
from ..deploy.slurm_jobs import SlurmJobs
from .cluster_state import incarnations, is_ready
from .local_cluster import commands, curl_example, notify
from .up import Plan
from .up_workers import pools_of

POLL_S = 0.5


class Launcher(Protocol):
    """Starts a cluster's processes on other hosts. All methods raise LaunchError."""

    def running(self) -> list[str]:
        """Return the names of the processes that run or wait for resources."""
        ...

    def start(self, name: str, role: str, argv: Sequence[str], env: Mapping[str, str]) -> None: ...

    def restart(self, name: str, role: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a process again; a worker drains before."""
        ...

    def stop(self, names: Sequence[str]) -> None:
        """Stop processes; a worker drains."""
        ...

    def host(self, deadline: float) -> str:
        """Return the coordinator's host, once it runs."""
        ...

    def log_of(self, name: str) -> str:
        """Return the command that shows a process's log."""
        ...


def launch(plan: Plan) -> int:
    """Make what runs equal to the plan. Return the exit status. Raises LaunchError."""
    try:
        return _launch(plan, launcher_of(plan))
    finally:
        plan.folder.close()


def launcher_of(plan: Plan) -> Launcher:
    """Return the launcher that ``--on`` names."""
    port = _port_of(plan.coordinator.control_address)
    ports = {each.name: _port_of(each.coordinator) for each in plan.workers}
    pools = {name: pool for pool, names in pools_of(plan.up) for name in names}
    if plan.up.on == "ray":
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read once, when ray is imported
        from ..deploy.ray_actors import RayActors

        ranks = {each.name: each.tensor_parallel_size for each in plan.workers}
        threads = {each.name: 1 if each.threads == "auto" else each.threads for each in plan.workers}
        return RayActors(
            plan.run_dir,
            port,
            num_cpus={name: ranks[name] * threads[name] for name in ranks},
            devices={each.name: each.device for each in plan.workers if each.runner == "model"},
            ranks=ranks,
            resources={name: _amounts(pool.ray) for name, pool in pools.items()},
            leave_s=max(each.drain_timeout_s for each in plan.workers) + plan.up.grace_s,
            # one that it adds is a copy of the first model's
            scales=plan.coordinator.steer_command is None and len(plan.models) == 1,
            ports=ports,
        )
    every = shlex.split(plan.up.sbatch)
    options = {name: [*every, *shlex.split(pool.sbatch)] for name, pool in pools.items()}
    return SlurmJobs(plan.run_dir, port, {"coordinator": every, **options}, ports)


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def _amounts(resources: str) -> dict[str, float]:
    named = (each.rpartition("=") for each in resources.split())
    return {name: float(amount) for name, _, amount in named}


def _launch(plan: Plan, launcher: Launcher) -> int:
    wanted = {} if plan.up.stop else {command.name: command for command in commands(plan)}
    running = launcher.running()
    anew = "coordinator" not in running  # workers of an earlier coordinator would not find this one
    launcher.stop([name for name in running if anew or name not in wanted])
    if plan.up.stop:
        notify(f"stopped: {', '.join(running) or 'nothing ran'}")
        return 0
    roles = {worker.name: str(getattr(worker, "start_as", worker.role)) for worker in plan.workers}
    for name, command in wanted.items():
        if anew or name not in running:
            launcher.start(name, roles.get(name, "coordinator"), command.argv, command.env)
    deadline = time.monotonic() + plan.up.ready_timeout_s
    notify(f"starting {' and '.join(plan.models)} on {plan.up.on}: {', '.join(wanted)} ...")
    url = url_of(launcher.host(deadline), plan.coordinator.port, plan.coordinator.scheme)
    if not asyncio.run(_ready(plan, launcher, url, set(wanted), deadline)):
        raise LaunchError(
            f"not ready after {plan.up.ready_timeout_s:g} s; see {launcher.log_of('coordinator')}"
        )
    if plan.up.roll and not anew:
        asyncio.run(_roll(plan, launcher, url, [wanted[name] for name in wanted if name in running], roles))
    notify(
        f"ready at {url}\n\n{curl_example(plan).replace(plan.url, url)}\n\n"
        "The same command with other numbers adds and drains workers, with --stop it ends all."
    )
    return 0


async def _ready(plan: Plan, launcher: Launcher, url: str, wanted: set[str], deadline: float) -> bool:
    """Wait until the cluster serves. Raises LaunchError where a process has ended."""
    while not await is_ready(url, *plan.asked_for_ready):
        if ended := sorted(wanted - set(launcher.running())):
            raise LaunchError(f"{ended[0]} could not start; its log: {launcher.log_of(ended[0])}")
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


async def _roll(
    plan: Plan, launcher: Launcher, url: str, old: Sequence[Command], roles: Mapping[str, str]
) -> None:
    """Start each process again once the one before is back, the coordinator last. Raises LaunchError where
    one does not come back."""
    known = partial(incarnations, plan, url)
    serves = partial(is_ready, url, *plan.asked_for_ready)
    waiting = {worker.name: worker.coordinator for worker in plan.workers}  # by model
    for each in [*old[1:], old[0]]:
        name, role = each.name, roles.get(each.name, "coordinator")
        before, deadline = await known(), time.monotonic() + plan.up.ready_timeout_s
        notify(f"{name} starts again ...")
        await asyncio.to_thread(launcher.restart, name, role, each.argv, each.env)
        lone = name in waiting  # the first of its model: a new build may fit no older one
        waiting = {other: model for other, model in waiting.items() if model != waiting.get(name)}
        while not (_is_back(name, before, await known()) and (lone or await serves())):
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{name} is not back after {plan.up.ready_timeout_s:g} s, the processes after it are as "
                    f"they were; its log: {launcher.log_of(name)}"
                )
            await asyncio.sleep(POLL_S)


def _is_back(name: str, before: Mapping[str, int], now: Mapping[str, int]) -> bool:
    """Whether a process is there in another incarnation, and every other one that was."""
    return name in now and now[name] != before.get(name) and before.keys() <= now.keys()
