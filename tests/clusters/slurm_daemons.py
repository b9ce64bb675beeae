"""A Slurm of a trial's own. Needs root and Debian's slurmctld, slurmd, slurm-client and munge."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from e2e.cluster import free_port
from watch import run, wait_for

REQUEUE_S = 10  # a job that is queued anew waits this long; Slurm's default is 120
CONF = """
ClusterName=trial
SlurmctldHost=localhost({host})
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
{more}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """One slurmctld, a slurmd a node; every daemon ends with it."""

    def __init__(
        self,
        folder: Path,
        nodes: Mapping[str, str],
        *,
        host: str = "127.0.0.1",
        on_node: Callable[[str], Sequence[str]] = lambda _: (),
        more: str = "",
    ) -> None:
        """``nodes``: Slurm's words for each, with its NodeAddr; ``host``: slurmctld's address; ``on_node``:
        what runs a command on a node; ``more``: lines of slurm.conf."""
        self.folder = folder
        rows = [
            f"NodeName={name} NodeHostname=localhost Port={free_port()} {words}"
            for name, words in nodes.items()
        ]
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir(mode=0o700)
        (folder / "munge/key").write_bytes(os.urandom(1024))
        (folder / "munge/key").chmod(0o400)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        text = CONF.format(
            folder=folder, host=host, ctld=free_port(), nodes="\n".join(rows), requeue=REQUEUE_S, more=more
        )
        (folder / "slurm.conf").write_text(text)
        munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        self._daemons = [
            self._start("munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *munge)
        ]
        wait_for("munge's socket", (folder / "munge/socket").exists)
        self._daemons.append(self._start("slurmctld", "-D"))
        self._daemons += [self._start(*on_node(name), "slurmd", "-D", "-N", name) for name in nodes]
        try:
            wait_for(
                "idle nodes", lambda: run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(len(nodes))
            )
        except SystemExit:
            print((folder / "daemons.out").read_text()[-3000:], file=sys.stderr)
            self.close()
            raise

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        log = (self.folder / "daemons.out").open("ab")
        return subprocess.Popen(command, stdout=log, stderr=log)

    def close(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(30)
