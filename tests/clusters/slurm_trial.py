"""A real slurmctld with four slurmd here: start, stream, time limit, crash, scale out and in, stop.

    python tests/clusters/slurm_trial.py bench/results/slurm.json

Needs root and Debian's slurmctld, slurmd, slurm-client and munge. Takes about 5
minutes; not a part of the tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from load import Load
from watch import Cluster, run, wait_for

from splitserve.bench.environment import environment
from splitserve.cli.up import free_port

REQUEUE_S = 10  # a job that is queued anew waits this long; Slurm's default is 120
CONF = """
ClusterName=trial
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={requeue}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A Slurm of this trial's own; every daemon ends with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        nodes = "\n".join(
            f"NodeName=n{number} NodeHostname=localhost NodeAddr=127.0.0.1 CPUs=4 Port={port}"
            for number, port in enumerate(free_port("127.0.0.1") for _ in range(4))
        )
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir(mode=0o700)
        (folder / "munge/key").write_bytes(os.urandom(1024))
        (folder / "munge/key").chmod(0o400)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        (folder / "slurm.conf").write_text(
            CONF.format(folder=folder, ctld=free_port("127.0.0.1"), nodes=nodes, requeue=REQUEUE_S)
        )
        munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        self._daemons = [
            self._start("munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *munge)
        ]
        wait_for("munge's socket", (folder / "munge/socket").exists)
        self._daemons.append(self._start("slurmctld", "-D"))
        self._daemons += [self._start("slurmd", "-D", "-N", f"n{number}") for number in range(4)]
        wait_for("four idle nodes", lambda: run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "4")

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{command[0]}.out").open("ab")
        return subprocess.Popen(command, stdout=log, stderr=log)

    def close(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(30)


def trial(folder: Path) -> dict[str, object]:
    """Return what was seen."""
    cluster, report = Cluster("slurm", folder / "shared"), dict[str, object]()

    def job(name: str) -> str:
        return str(json.loads((cluster.folder / "jobs.json").read_text())[name])

    report["seconds from sbatch to ready"] = cluster.up(1, 2)
    report["jobs"] = run("squeue", "--noheader", "--format", "%j %N %T").splitlines()
    before = cluster.workers()
    with Load(cluster.url) as load:
        wait_for("some answers", lambda: load.answers > load.num_streams)
        run("scontrol", "update", f"JobId={job('decode-1')}", "TimeLimit=4")  # it drains 4 minutes before
        limit = wait_for("the drain", lambda: "decode-1" not in cluster.workers())
        report["seconds to the drain at the time limit"] = limit
        run("scontrol", "update", f"JobId={job('decode-1')}", "TimeLimit=UNLIMITED")
        report["seconds until it is back"] = wait_for(
            "decode-1", lambda: "decode-1" in cluster.workers(), 300
        )
        assert cluster.workers()["decode-1"] != before["decode-1"]
        report["sequences moved at the time limit"] = cluster.moved()
        after = load.answers
        os.kill(cluster.workers()["decode-0"], signal.SIGKILL)
        report["seconds until a killed worker is back"] = cluster.is_back("decode-0", before["decode-0"])
        report["seconds of scaling out to 2P3D"] = cluster.up(2, 3)
        wait_for("five workers", lambda: len(cluster.workers()) == 5)
        report["seconds of scaling in to 1P2D"] = cluster.up(1, 2)
        wait_for("three workers", lambda: len(cluster.workers()) == 3)
        wait_for("more answers", lambda: load.answers > after + 2 * load.num_streams)
        report["sequences moved in all"] = cluster.moved()
    report["streams"] = load.summary()
    report["problems"] = load.problems[:5]
    cluster.up(1, 2, "--stop")
    report["seconds until no job is left"] = wait_for("no jobs", lambda: not run("squeue", "--noheader"))
    return report


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        slurm = Slurm(Path(folder))
        try:
            report = {
                "environment": environment(),
                "slurm": run("slurmctld", "-V").strip(),
                **trial(Path(folder)),
            }
        except BaseException:
            for log in sorted(Path(folder).glob("shared/*.log")):
                print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
            subprocess.run(["scancel", "--me"], check=False)
            time.sleep(5)
            raise
        finally:
            slurm.close()
    text = json.dumps(report, indent=2)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")
    raise SystemExit(1 if report["problems"] else 0)


if __name__ == "__main__":
    main()
