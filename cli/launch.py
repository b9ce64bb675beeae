"""``splitserve up --on slurm``: starts what is missing, stops what is too much, waits until it serves."""

from __future__ import annotations

import asyncio
import shlex
import time

from ..coordinator.http.access.url import url_of
from ..deploy.errors import LaunchError
from ..deploy.slurm_jobs import SlurmJobs
from .local_cluster import commands, curl_example, is_ready, notify
from .up import Plan

POLL_S = 0.5


def launch(plan: Plan) -> int:
    """Make what runs equal to the plan. Return the exit status. Raises LaunchError."""
    try:
        return _launch(plan, jobs_of(plan))
    finally:
        plan.folder.close()


def jobs_of(plan: Plan) -> SlurmJobs:
    """Return the cluster's jobs, with the options of each role."""
    port = int(plan.coordinator.control_address.rpartition(":")[2])
    every = shlex.split(plan.up.sbatch)
    further = {"prefill": plan.up.sbatch_prefill, "decode": plan.up.sbatch_decode}
    options = {role: [*every, *shlex.split(text)] for role, text in further.items()}
    return SlurmJobs(plan.run_dir, port, {"coordinator": every, "mixed": every, **options})


def _launch(plan: Plan, jobs: SlurmJobs) -> int:
    wanted = {} if plan.up.stop else {command.name: command for command in commands(plan)}
    running = jobs.running()
    anew = "coordinator" not in running  # workers of an earlier coordinator would not find this one
    jobs.stop([name for name in running if anew or name not in wanted])
    if plan.up.stop:
        notify(f"stopped: {', '.join(running) or 'nothing ran'}")
        return 0
    roles = {worker.name: str(getattr(worker, "start_as", worker.role)) for worker in plan.workers}
    for name, command in wanted.items():
        if anew or name not in running:
            jobs.start(name, roles.get(name, "coordinator"), command.argv, command.env)
    deadline = time.monotonic() + plan.up.ready_timeout_s
    notify(f"starting {plan.coordinator.model_name} on {plan.up.on}: {', '.join(wanted)} ...")
    url = url_of(jobs.host(deadline), plan.coordinator.port, plan.coordinator.scheme)
    if not asyncio.run(_ready(plan, jobs, url, set(wanted), deadline)):
        raise LaunchError(f"not ready after {plan.up.ready_timeout_s:g} s; see {jobs.log_of('coordinator')}")
    notify(
        f"ready at {url}\n\n{curl_example(plan).replace(plan.url, url)}\n\n"
        "The same command with other numbers adds and drains workers, with --stop it ends all."
    )
    return 0


async def _ready(plan: Plan, jobs: SlurmJobs, url: str, wanted: set[str], deadline: float) -> bool:
    """Wait until the cluster serves. Raises LaunchError where a process has ended."""
    while not await is_ready(url, plan.coordinator.tls_cert):
        if ended := sorted(wanted - set(jobs.running())):
            raise LaunchError(f"{ended[0]} could not start; its log: {jobs.log_of(ended[0])}")
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True
