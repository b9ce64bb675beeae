"""Slurm's jobs, with Slurm's commands played by scripts; with real daemons: tests/clusters/slurm_trial.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from splitserve.deploy.errors import LaunchError
from splitserve.deploy.slurm_jobs import TEMPLATE, SlurmJobs

LOGGED = 'echo "$(basename "$0")" "$@" >>"$CALLS"\n'
COMMANDS = {
    "sbatch": LOGGED + 'env | grep ^COORDINATOR >>"$CALLS"; echo $(($(grep -c ^sbatch "$CALLS") + 100))',
    "squeue": LOGGED + 'case "$*" in *%A*) echo 101; echo 102 ;; *%N*) echo "gpu[3-4]" ;; esac',
    "scancel": LOGGED,
    "scontrol": LOGGED + 'case "$*" in *hostnames*) echo gpu3; echo gpu4 ;; '
    "*node*) echo 'NodeName=gpu3 NodeAddr=192.0.2.3 State=IDLE' ;; esac",
}


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with every call of one of Slurm's commands."""
    (tmp_path / "bin").mkdir()
    for name, script in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def jobs_of(folder: Path) -> SlurmJobs:
    options = {"coordinator": ["--time", "8:00:00"], "decode-1": ["--gpus", "1"]}
    return SlurmJobs(folder, 7701, options, {"decode-2": 7710})


def test_each_process_is_a_job_that_finds_the_coordinators(tmp_path: Path, calls: Path) -> None:
    jobs, env = jobs_of(tmp_path), dict(os.environ)
    jobs.start("coordinator", "coordinator", ["splitserve", "coordinator"], env)
    jobs.start("decode-1", "decode", ["splitserve", "decode"], env)
    assert "COORDINATOR_PORT=7701" in calls.read_text().splitlines()
    jobs.start("decode-2", "decode", ["splitserve", "decode"], env)
    assert "COORDINATOR_PORT=7710" in calls.read_text().splitlines(), "another model's"
    jobs.stop(["decode-2"])
    text = calls.read_text()
    assert "--job-name coordinator --output" in text
    assert f"--time 8:00:00 {TEMPLATE} splitserve coordinator" in text
    assert f"--signal=B:USR1@240 --gpus 1 {TEMPLATE} splitserve decode" in text, "3 minutes before decode-0"
    assert {"COORDINATOR_JOB=101", "COORDINATOR_PORT=7701"} <= set(text.splitlines())
    assert jobs.running() == ["coordinator", "decode-1"]
    assert jobs.host(time.monotonic() + 10) == "192.0.2.3"
    jobs.restart("decode-1", "decode", [], env)
    assert calls.read_text().splitlines()[-1] == "scancel --batch --signal=USR2 102"
    jobs.stop(["decode-1", "decode-7"])
    assert calls.read_text().splitlines()[-1] == "scancel 102"


def test_a_refusal_of_slurms_is_passed_on(tmp_path: Path, calls: Path) -> None:
    (tmp_path / "bin" / "sbatch").write_text(
        "#!/bin/bash\necho 'sbatch: error: invalid partition' >&2; exit 1\n"
    )
    with pytest.raises(LaunchError, match="invalid partition"):
        jobs_of(tmp_path).start("coordinator", "coordinator", ["true"], dict(os.environ))


def test_without_slurm_the_message_has_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="squeue is not installed here: run this on a login node"):
        jobs_of(tmp_path).running()


def begin(tmp_path: Path, script: str, **env: str) -> subprocess.Popen[str]:
    """A job as Slurm starts it."""
    (tmp_path / "process").write_text(f"#!/bin/bash\n{script}\n")
    (tmp_path / "process").chmod(0o755)
    return subprocess.Popen(
        ["bash", str(TEMPLATE), str(tmp_path / "process")],
        env={**os.environ, "SLURM_JOB_ID": "105", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_before_the_time_limit_the_process_drains_and_the_job_is_queued_anew(
    tmp_path: Path, calls: Path
) -> None:
    job = begin(tmp_path, "trap 'echo drained; exit 0' TERM; echo begun; while :; do sleep 0.05; done")
    assert job.stdout is not None
    assert job.stdout.readline() == "begun\n"
    job.send_signal(signal.SIGUSR1)
    assert job.communicate(timeout=30)[0] == "drained\n"
    assert calls.read_text() == "scontrol requeue 105\n"


def test_a_process_that_is_rolled_drains_and_starts_again_in_its_job(tmp_path: Path, calls: Path) -> None:
    job = begin(
        tmp_path,
        f"cd {tmp_path}; [[ -e again ]] && {{ echo new; exit; }}\n"
        "trap 'echo drained; touch again; exit 0' TERM; echo begun; while :; do sleep 0.05; done",
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "begun\n"
    job.send_signal(signal.SIGUSR2)
    assert job.communicate(timeout=30)[0] == "drained\nnew\n"
    assert job.returncode == 0
    assert not calls.exists(), "it is not queued anew"


def test_a_cancelled_job_waits_while_its_process_drains(tmp_path: Path, calls: Path) -> None:
    job = begin(
        tmp_path, "trap 'sleep 0.3; echo drained; exit 0' TERM; echo $$; while :; do sleep 0.05; done"
    )
    assert job.stdout is not None
    process = int(job.stdout.readline())
    for pid in (job.pid, process):  # as Slurm does
        os.kill(pid, signal.SIGTERM)
    assert job.communicate(timeout=30)[0] == "drained\n"
    assert job.returncode == 0
    assert not calls.exists(), "it is not queued anew"


def test_a_process_that_crashes_starts_again_and_finds_the_coordinator(tmp_path: Path, calls: Path) -> None:
    script = 'echo "$SPLITSERVE_COORDINATOR"; [[ -e again ]] && exit 0; touch again; kill -9 $$'
    job = begin(tmp_path, f"cd {tmp_path}; {script}", COORDINATOR_JOB="101", COORDINATOR_PORT="7701")
    printed = job.communicate(timeout=30)[0]
    assert job.returncode == 0
    assert printed.count("tcp://192.0.2.3:7701") == 2
    assert "ended with status 137, starts again" in printed


def test_a_process_that_cannot_start_fails_the_job(tmp_path: Path, calls: Path) -> None:
    job = begin(tmp_path, "echo wrong option; exit 2")
    assert job.communicate(timeout=30)[0].count("wrong option") == 3
    assert job.returncode == 2


def test_jobs_file_is_read_by_a_later_command(tmp_path: Path, calls: Path) -> None:
    (tmp_path / "jobs.json").write_text(json.dumps({"coordinator": "101", "decode-0": "99"}))
    assert jobs_of(tmp_path).running() == ["coordinator"]
