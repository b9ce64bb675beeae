"""A real Ray here whose autoscaler starts and ends nodes: start, stream, kill a process, an actor, a raylet,
scale out and in, by hand and by the pool controller, stop.

    python tests/clusters/ray_trial.py bench/results/ray.json

Needs ray[default]. Ends every Ray of this machine. Takes about 8 minutes; not a part of the tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import ray
from e2e.cluster import free_port
from load import Load
from watch import Cluster, wait_for

from splitserve.bench.environment import environment
from splitserve.engine.latency_profile import Memory, Piece, Profile, StepModel

BIN = Path(sys.executable).parent
RAY = str(BIN / "ray")
JOB = Path(__file__).parents[2] / "deploy" / "ray_job.yaml"
OBJECT_STORE = 100_000_000
NODE = {"resources": {"CPU": 2, "object_store_memory": OBJECT_STORE}, "node_config": {}}
EMPTY_LISTS = ["cluster_synced_files", "rsync_exclude", "rsync_filter"]
EMPTY_LISTS += [f"{name}_commands" for name in ("initialization", "setup", "head_setup", "worker_setup")]
EMPTY_LISTS += ["head_start_ray_commands", "worker_start_ray_commands"]
STEER = "--steer act --steer-slo ttft=5,tpot=0.5@p50 --steer-max-workers 3 --steer-queue-depth 4 "
STEER += (
    "--steer-cooldown-s 5 --steer-scale-up-after-s 1 --steer-scale-down-after-s 5 --decode-max-num-seqs 4 "
)
STEER += "--prefill-max-num-seqs 4"


class Ray:
    """A Ray of this trial's own: a head without CPUs, and nodes of two that its autoscaler starts."""

    def __init__(self, folder: Path) -> None:
        os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
        port = free_port()
        config = {
            "cluster_name": "trial",
            "max_workers": 4,
            "upscaling_speed": 10,
            "idle_timeout_minutes": 0.3,
            "provider": {
                "type": "fake_multinode",
                "gcs_address": f"127.0.0.1:{port}",
                "disable_node_updaters": True,
                "use_node_id_as_ip": True,
            },
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
                "node": {**NODE, "min_workers": 0, "max_workers": 4},
            },
            **{name: {} for name in ("auth", "docker", "file_mounts")},
            **{name: [] for name in EMPTY_LISTS},
            "file_mounts_sync_continuously": False,
        }
        (folder / "ray.json").write_text(json.dumps(config))
        self.jobs = f"http://127.0.0.1:{(jobs := free_port())}"
        command = [RAY, "start", "--head", f"--port={port}", "--num-cpus=0", "--disable-usage-stats"]
        command += [f"--object-store-memory={OBJECT_STORE}", f"--dashboard-port={jobs}"]
        command += [f"--autoscaling-config={folder / 'ray.json'}"]
        for key in [key for key in os.environ if key.startswith("RAY_")]:
            del os.environ[key]
        quick = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        with (folder / "head.log").open("wb") as log:  # Ray's daemons keep it: no pipe, which they would hold
            subprocess.run(command, env={**os.environ, **quick}, stdout=log, stderr=log, check=True)
        os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"

    def close(self) -> None:
        ray.shutdown()
        subprocess.run([RAY, "stop", "--force"], stdout=sys.stderr, check=True)


def nodes() -> int:
    """Return the number of nodes besides the head."""
    return sum(node["Alive"] for node in ray.nodes()) - 1


def raylet_of(pid: int) -> psutil.Process:
    """Return the raylet of a process's node."""
    return next(parent for parent in psutil.Process(pid).parents() if parent.name() == "raylet")


def back_after(cluster: Cluster, act: Callable[[], object], names: list[str]) -> float:
    """Return the seconds until the workers run in other processes."""
    old = cluster.workers()
    act()
    return max(cluster.is_back(name, old[name]) for name in names)


def trial(folder: Path, jobs: str) -> dict[str, object]:
    """Return what was seen."""
    cluster, report = Cluster("ray", folder / "run"), dict[str, object]()
    submit = [RAY, "job", "submit", "--address", jobs, "--runtime-env", str(JOB), "--"]
    report["seconds from `ray job submit` to ready"] = cluster.up(1, 2, by=submit)
    ray.init(namespace=f"splitserve:{folder / 'run'}", log_to_driver=False, logging_level="error")
    report["nodes that the autoscaler started"] = nodes()
    with Load(cluster.url, num_streams=32) as load:
        wait_for("some answers", lambda: load.answers > load.num_streams)
        workers = cluster.workers()
        report["seconds until a killed process is back"] = back_after(
            cluster, lambda: os.kill(workers["decode-0"], signal.SIGKILL), ["decode-0"]
        )
        report["seconds until a killed actor's process is back"] = back_after(
            cluster, psutil.Process(workers["decode-1"]).parent().kill, ["decode-1"]
        )
        report["seconds of scaling out to 2P4D"] = cluster.up(2, 4)
        wait_for("six workers", lambda: len(cluster.workers()) == 6)
        report["nodes then"] = nodes()
        workers = cluster.workers()
        raylets = {name: raylet_of(pid) for name, pid in workers.items()}
        shared = Counter(each.pid for name, each in raylets.items() if name not in ("prefill-0", "decode-0"))
        victim = psutil.Process(shared.most_common(1)[0][0])
        names = [name for name, each in raylets.items() if each.pid == victim.pid]
        report["workers of a killed raylet"] = names
        report["seconds until they are back"] = back_after(cluster, victim.kill, names)
        before = cluster.moved()
        report["seconds of scaling in to 1P2D"] = cluster.up(1, 2)
        wait_for("three workers", lambda: len(cluster.workers()) == 3)
        report["sequences moved then"] = cluster.moved() - before
        after = load.answers
        wait_for("more answers", lambda: load.answers > after + 2 * load.num_streams)
    report["streams"], report["problems"] = load.summary(), load.problems[:5]
    report["seconds to stop all"] = cluster.up(1, 2, "--stop")
    report["actors left"] = ray.util.list_named_actors()
    report["seconds until the autoscaler has ended all nodes"] = wait_for("no nodes", lambda: nodes() == 0)
    return report


def steered(folder: Path) -> dict[str, object]:
    """The pool controller adds a worker under load, for which a node starts, and drains it."""
    profile = folder / "profile.json"
    Profile(
        name="trial",
        memory=Memory(block_size=16, num_blocks=600, block_bytes=1 << 14, num_layers=8, max_model_len=512),
        prefill=StepModel(pieces=(Piece(curve=((0, 0.0), (512, 0.16))),)),
        decode=StepModel(pieces=(Piece(curve=((0, 0.02),)),)),
    ).write(profile)
    cluster, report = Cluster("ray", folder / "steered"), dict[str, object]()
    more = [*STEER.split(), "--steer-profile", str(profile)]
    cluster.up(1, 1, *more)
    before = nodes()
    with Load(cluster.url, num_streams=32) as load:
        report["seconds until the controller's worker serves"] = wait_for(
            "a third worker", lambda: len(cluster.workers()) == 3
        )
        report["workers"], report["nodes"] = sorted(cluster.workers()), [before, nodes()]
        after = load.answers
        wait_for("more answers", lambda: load.answers > after + load.num_streams)
    report["seconds until it has left again"] = wait_for("two workers", lambda: len(cluster.workers()) == 2)
    report["seconds until its node has ended"] = wait_for("its node", lambda: nodes() == before)
    report["streams"], report["problems"] = load.summary(), load.problems[:5]
    cluster.up(1, 1, *more, "--stop")
    return report


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ray-") as name:
        folder = Path(name)
        own = Ray(folder)
        try:
            report = {"environment": environment(), "ray": ray.__version__, **trial(folder, own.jobs)}
            report["by the pool controller"] = steered(folder)
        finally:
            own.close()
    text = json.dumps(report, indent=2)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")
    raise SystemExit(1 if report["problems"] or report["by the pool controller"]["problems"] else 0)


if __name__ == "__main__":
    main()
