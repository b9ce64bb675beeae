"""A cluster's processes as Slurm jobs: one job a process, each from ``slurm.sbatch``."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import LaunchError

TEMPLATE = Path(__file__).parent / "slurm.sbatch"
JOBS = "jobs.json"
COMMAND_TIMEOUT_S = 60.0
LEAD_S = 60
"""Seconds before a job's time limit in which its worker drains; no less than twice --drain-timeout-s."""
STAGGER_S, MAX_STAGGERS = 180, 4
"""Workers of a role that start together drain at up to 4 times, 3 minutes apart: Slurm keeps a job that is
queued anew for 2 minutes by default."""


class SlurmJobs:
    """The jobs of one cluster; ``folder``, which every node sees, has their logs and numbers."""

    def __init__(
        self,
        folder: Path,
        port: int,
        options: Mapping[str, Sequence[str]],
        ports: Mapping[str, int] | None = None,
    ) -> None:
        """``port``: of the coordinator's control address; ``options``: those of sbatch, by name; ``ports``:
        those of workers that connect to another, by name."""
        self._folder, self._port, self._options, self._ports = folder, port, options, ports or {}

    def running(self) -> list[str]:
        """Return the names of the processes whose jobs run or wait. Raises LaunchError."""
        numbers = self._numbers()
        here = set(_run("squeue", "--noheader", "--me", "--format", "%A").split())
        return [name for name, number in numbers.items() if number in here]

    def start(self, name: str, role: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Submit a job; a worker's finds the coordinator by the node list of its job. Raises LaunchError."""
        numbers = self._numbers()
        env = dict(env)
        if role != "coordinator":
            port = self._ports.get(name, self._port)
            env |= {"COORDINATOR_JOB": numbers["coordinator"], "COORDINATOR_PORT": str(port)}
        log = self._folder / f"{name}.log"
        lead = LEAD_S + STAGGER_S * (int(name.rpartition("-")[2]) % MAX_STAGGERS if "-" in name else 0)
        ours = ["--parsable", "--job-name", name, "--output", str(log), "--chdir", str(self._folder)]
        ours.append(f"--signal=B:USR1@{lead}")
        printed = _run("sbatch", *ours, *self._options.get(name, ()), str(TEMPLATE), *argv, env=env)
        numbers[name] = printed.strip().partition(";")[0]
        (self._folder / JOBS).write_text(json.dumps(numbers), encoding="utf-8")

    def stop(self, names: Sequence[str]) -> None:
        """Cancel jobs: a worker drains. Raises LaunchError."""
        numbers = self._numbers()
        if wanted := [numbers[name] for name in names if name in numbers]:
            _run("scancel", *wanted)

    def restart(self, name: str, role: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Have a process start again within its job, once a worker has drained. Raises LaunchError."""
        _run("scancel", "--batch", "--signal=USR2", self._numbers()[name])

    def host(self, deadline: float) -> str:
        """Wait for the coordinator's job to run; return its node's address. Raises LaunchError.

        ``deadline``: of the monotonic clock, in seconds.
        """
        number = self._numbers()["coordinator"]
        while not (nodes := _run("squeue", "--noheader", "--jobs", number, "--format", "%N").strip()):
            if time.monotonic() > deadline:
                reason = _run("squeue", "--noheader", "--jobs", number, "--format", "%r").strip()
                raise LaunchError(f"job {number}, the coordinator's, still waits ({reason})")
            time.sleep(1)
        node = _run("scontrol", "show", "hostnames", nodes).split()[0]
        fields = _run("scontrol", "--oneliner", "show", "node", node).split()
        return next(field.partition("=")[2] for field in fields if field.startswith("NodeAddr="))

    def log_of(self, name: str) -> str:
        """Return how to read a process's log."""
        return f"tail -f {self._folder / name}.log"

    def _numbers(self) -> dict[str, str]:
        try:
            numbers: dict[str, str] = json.loads((self._folder / JOBS).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return numbers


def _run(*command: str, env: Mapping[str, str] | None = None) -> str:
    """Return what one of Slurm's commands prints. Raises LaunchError."""
    try:
        done = subprocess.run(
            command,
            env=os.environ if env is None else env,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(f"{command[0]} is not installed here: run this on a login node of Slurm") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{command[0]} does not answer: see `scontrol ping`") from None
    if done.returncode:
        raise LaunchError(f"{command[0]}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout
