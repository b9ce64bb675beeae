"""A real slurmctld with four slurmd here: start, stream, time limit, crash, scale out and in, stop.

    python tests/clusters/slurm_trial.py bench/results/slurm.json

Needs root and Debian's slurmctld, slurmd, slurm-client and munge. Takes about 5 minutes; not a part of the
tests.
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
from slurm_daemons import Slurm
from watch import Cluster, run, wait_for

from splitserve.bench.environment import environment

NODES = {f"n{number}": "NodeAddr=127.0.0.1 CPUs=4" for number in range(4)}


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
        slurm = Slurm(Path(folder), NODES)
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
