"""Slurm and Ray of a trial's own, on four nodes (namespaces.py): each has room for a worker of each role."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from e2e.cluster import free_port
from namespaces import HERE, address, on_node
from slurm_daemons import REQUEUE_S, Slurm
from watch import run, wait_for

NODES = "abcd"
QUICK = {
    "RAY_worker_niceness": "0",  # at 15, a machine that others use leaves nothing to it
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}


class Site(Protocol):
    """What places the processes on nodes."""

    options: tuple[str, ...]  # of `up`
    about: dict[str, object]

    def drain(self, node: str) -> None:
        """Have a node's workers go on elsewhere, by the site's own command."""
        ...

    def restore(self, node: str) -> None:
        """Have a node that was drained, or cut off and joined again, take work."""
        ...

    def close(self) -> None: ...


class OnSlurm:
    """Each node has a generic resource for a worker of each role, as GPUs are."""

    options = ("--sbatch-prefill", "--gres=prefill:1", "--sbatch-decode", "--gres=decode:1")

    def __init__(self, folder: Path) -> None:
        self._slurm = Slurm(
            folder,
            {
                "head": f"NodeAddr={HERE} CPUs=1 Weight=1",
                **{
                    name: f"NodeAddr={address(name)} CPUs=2 Weight=2 Gres=prefill:1,decode:1"
                    for name in NODES
                },
            },
            host=HERE,
            on_node=lambda name: [] if name == "head" else on_node(name),
            more="GresTypes=prefill,decode\nSlurmdTimeout=10",
        )
        self.about = {
            "slurm": run("slurmctld", "-V").strip(),
            "settings": f"SlurmdTimeout=10, cred_expire={REQUEUE_S}",
        }

    def drain(self, node: str) -> None:
        run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=trial")
        run("scontrol", "requeue", ",".join(run("squeue", "-h", "-w", node, "-o", "%A").split()))

    def restore(self, node: str) -> None:
        def idle() -> bool:
            return "idle" in run("sinfo", "-h", "-n", node, "-o", "%t")

        if "drain" in run("sinfo", "-h", "-n", node, "-o", "%t"):
            run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        wait_for(f"node {node}", idle)

    def close(self) -> None:
        subprocess.run(["scancel", "--me"], check=False)
        wait_for("no jobs", lambda: not run("squeue", "--noheader"))
        self._slurm.close()


class OnRay:
    """Each node has a resource for a worker of each role; the head has none."""

    options = ("--ray-prefill", "prefill=1", "--ray-decode", "decode=1")

    def __init__(self, folder: Path) -> None:
        import ray

        self._ray, self._folder, self._port = ray, folder, free_port()
        self._raylets: dict[str, subprocess.Popen[bytes]] = {}
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        for key in [key for key in os.environ if key.startswith("RAY_")]:
            del os.environ[key]
        os.environ.update(QUICK)
        self._start("head", "--head", f"--port={self._port}", "--num-cpus=0", "--include-dashboard=false")
        os.environ["RAY_ADDRESS"] = f"{HERE}:{self._port}"
        wait_for("Ray", lambda: subprocess.run(["ray", "status"], capture_output=True).returncode == 0)
        ray.init(namespace="trial", log_to_driver=False, logging_level="error")
        for name in NODES:
            self._start_node(name)
        self.about = {"ray": ray.__version__, "settings": " ".join(map("=".join, QUICK.items()))}

    def _start(self, name: str, *options: str) -> None:
        command = [*(on_node(name) if name != "head" else []), "ray", "start", "--block"]
        command += ["--disable-usage-stats", "--object-store-memory=100000000", *options]
        command.append(f"--node-ip-address={HERE if name == 'head' else address(name)}")
        with (self._folder / f"ray-{name}.out").open("ab") as log:
            self._raylets[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def _start_node(self, name: str) -> None:
        resources = json.dumps({"prefill": 1, "decode": 1})
        self._start(name, f"--address={HERE}:{self._port}", "--num-cpus=2", f"--resources={resources}")
        wait_for(f"node {name}", lambda: self._is_up(name))  # two at once may choose the same ports

    def _is_up(self, name: str) -> bool:
        if self._raylets[name].poll() is not None:
            self._start_node(name)  # Ray gives up where the machine is slow
        return name in self._alive()

    def _alive(self) -> dict[str, str]:
        rows = [row for row in self._ray.nodes() if row["Alive"]]
        by_address = {row["NodeManagerAddress"]: row["NodeID"] for row in rows}
        return {name: by_address[address(name)] for name in NODES if address(name) in by_address}

    def drain(self, node: str) -> None:
        why = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=trial"]
        run("ray", "drain-node", f"--address={HERE}:{self._port}", f"--node-id={self._alive()[node]}", *why,
            "--deadline-remaining-seconds=600")  # fmt: skip

    def restore(self, node: str) -> None:
        old = self._alive().get(node)
        self._end(node)
        wait_for("its end", lambda: self._alive().get(node) in (None, *([] if old else [""])))
        self._start_node(node)

    def _end(self, name: str) -> None:
        self._raylets[name].terminate()
        try:
            self._raylets[name].wait(30)
        except subprocess.TimeoutExpired:
            self._raylets[name].kill()
            self._raylets[name].wait(30)

    def close(self) -> None:
        self._ray.shutdown()
        for name in reversed(list(self._raylets)):
            self._end(name)
