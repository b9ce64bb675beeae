"""What is done to a cluster that Slurm or Ray runs, under 32 streams with idempotency keys: every process is
rolled to a build with the next wire version, the coordinator killed, a node drained, a node cut off, the
cluster scaled to 4P4D and back.

    PYTHONPATH=tests python tests/clusters/launcher_trial.py slurm bench/results/rolling-slurm.json
    PYTHONPATH=tests python tests/clusters/launcher_trial.py ray bench/results/rolling-ray.json

Four nodes, each for one prefill and one decode worker, are network namespaces of this machine: needs root and
iproute2, and Slurm's daemons (slurm_trial.py) or ray[default]. Takes 5 minutes; not a part of the tests.
Exit status 0: no answer was lost, none differed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import httpx
from namespaces import HERE, address, cut, inside, join, node_of, nodes, on_node
from resuming_load import NUM_STREAMS, Streams
from slurm_daemons import REQUEUE_S, Slurm
from watch import Cluster, run, wait_for

from splitserve.bench.environment import environment
from splitserve.cli.up import free_port
from splitserve.transport.messages.fields import WIRE_VERSION

NODES = "abcd"
PAUSE_S = 8.0
HOME = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
MORE = {f"{role}-{number}" for role in ("prefill", "decode") for number in (2, 3)}


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

        self._ray, self._folder, self._port = ray, folder, free_port("127.0.0.1")
        self._raylets: dict[str, subprocess.Popen[bytes]] = {}
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        for key in [key for key in os.environ if key.startswith("RAY_")]:
            del os.environ[key]
        os.environ.update(RAY_worker_niceness="0")  # at 15, a machine that others use leaves nothing to it
        self._start("head", "--head", f"--port={self._port}", "--num-cpus=0", "--include-dashboard=false")
        os.environ["RAY_ADDRESS"] = f"{HERE}:{self._port}"
        wait_for("Ray", lambda: subprocess.run(["ray", "status"], capture_output=True).returncode == 0)
        ray.init(namespace="trial", log_to_driver=False, logging_level="error")
        for name in NODES:
            self._start_node(name)
        self.about = {"ray": ray.__version__, "settings": "RAY_worker_niceness=0"}

    def _start(self, name: str, *options: str) -> None:
        command = [*(on_node(name) if name != "head" else []), "ray", "start", "--block"]
        command += ["--disable-usage-stats", "--object-store-memory=100000000", *options]
        command.append(f"--node-ip-address={HERE if name == 'head' else address(name)}")
        with (self._folder / f"ray-{name}.out").open("ab") as log:
            self._raylets[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def _start_node(self, name: str) -> None:
        resources = json.dumps({"prefill": 1, "decode": 1})
        self._start(name, f"--address={HERE}:{self._port}", "--num-cpus=2", f"--resources={resources}")
        wait_for(f"node {name}", lambda: name in self._alive())  # two at once may choose the same ports

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


class Trial:
    """A cluster, its site and its clients."""

    def __init__(self, on: str, folder: Path) -> None:
        self.build = folder / "build"
        self.build.mkdir()
        os.environ["PYTHONPATH"] = f"{self.build}:{Path(__file__).parents[1]}"
        self.site: Site = OnSlurm(folder) if on == "slurm" else OnRay(folder)
        self.cluster = Cluster(on, folder / "run")
        self.streams = Streams([self.cluster.url])
        self.report: dict[str, Any] = {}

    async def up(self, prefill: int, decode: int, *more: str) -> float:
        options = ["--mover", "tcp", *self.site.options, *more]
        return await asyncio.to_thread(self.cluster.up, prefill, decode, *options)

    def processes(self) -> dict[str, dict[str, Any]]:
        """Return the workers that do not drain, and the coordinator; empty: it does not answer."""
        try:
            state = self.cluster.state()
        except httpx.HTTPError:
            return {}
        found = {each["worker_id"]: each for each in state["workers"] if not each["draining"]}
        return {**found, "coordinator": state["coordinator"]}

    async def serves(
        self, what: str, names: Collection[str], old: Mapping[str, int], timeout_s: float = 180.0
    ) -> float:
        """Wait for exactly these workers, none in an old incarnation, and readiness. Return the seconds."""

        def there() -> bool:
            now = self.processes()
            fresh = all(name in now and now[name]["incarnation"] != old[name] for name in old)
            return (
                bool(now) and now.keys() == {*names, "coordinator"} and fresh and now["coordinator"]["ready"]
            )

        return await until(what, there, timeout_s)

    def on(self, node: str) -> dict[str, int]:
        """Return the incarnations of a node's workers."""
        return {
            name: each["incarnation"]
            for name, each in self.processes().items()
            if node_of(each["pid"]) == node
        }


async def until(what: str, condition: Callable[[], bool], timeout_s: float) -> float:
    return await asyncio.to_thread(wait_for, what, condition, timeout_s)


async def acts(trial: Trial) -> None:
    """Everything that is done to it, one after the other."""
    streams, report, site = trial.streams, trial.report, trial.site
    old = {name: each["incarnation"] for name, each in trial.processes().items()}
    streams.act = "every process is rolled to the next build"
    (trial.build / "sitecustomize.py").write_text("import support.next_build\n")
    report["seconds to roll all five processes"] = await trial.up(2, 2, "--roll")
    await trial.serves("the next build", HOME, old)
    versions = {trial.processes()[name]["wire_version"] for name in HOME}
    assert versions == {WIRE_VERSION + 1}, versions
    streams.act = "the coordinator is killed"
    coordinator = trial.processes()["coordinator"]
    os.kill(coordinator["pid"], signal.SIGKILL)
    report["seconds until a killed coordinator serves again"] = await trial.serves(
        "the coordinator", HOME, {"coordinator": coordinator["incarnation"]}
    )
    await asyncio.sleep(PAUSE_S)

    streams.act = "a node is drained"
    node = node_of(trial.processes()["decode-1"]["pid"])
    there = trial.on(node)
    report["workers of the node that is drained"] = sorted(there)
    before = await asyncio.to_thread(trial.cluster.moved)
    began = time.monotonic()
    await asyncio.to_thread(site.drain, node)
    await trial.serves("the node's workers", HOME, there)
    report["seconds until they serve elsewhere"] = round(time.monotonic() - began, 1)
    report["sequences moved then"] = await asyncio.to_thread(trial.cluster.moved) - before
    assert not trial.on(node), "it is empty"
    await asyncio.to_thread(site.restore, node)

    streams.act = "a node is cut off"
    node = node_of(trial.processes()["decode-1"]["pid"])
    there = trial.on(node)
    report["workers of the node that is cut off"] = sorted(there)
    cut(node)
    began = time.monotonic()
    gone = await trial.serves("its loss", HOME - there.keys(), {})
    report["seconds until it is left out"] = gone
    await trial.serves("its workers", HOME, there)
    report["seconds until its workers serve elsewhere"] = round(time.monotonic() - began, 1)
    join(node)
    await asyncio.to_thread(site.restore, node)
    await asyncio.sleep(PAUSE_S)
    await trial.serves("a node that joins again leaves the rest alone", HOME, there)

    streams.act = "scaled to 4P4D"
    report["4P4D: seconds, medians of the new workers"] = await scaled_out(trial)
    await trial.serves("4P4D", HOME | MORE, {})
    await asyncio.sleep(PAUSE_S)
    streams.act = "scaled back"
    report["seconds of scaling back"] = await trial.up(2, 2)
    await trial.serves("2P2D", HOME, {})


async def scaled_out(trial: Trial) -> dict[str, float]:
    """Return the seconds until a new worker is known, then until it holds a request, and its phases."""
    began, known, served = time.monotonic(), dict[str, float](), dict[str, float]()
    adding = asyncio.create_task(trial.up(4, 4))
    while len(served) < len(MORE) and time.monotonic() < began + 120:
        for name, each in (await asyncio.to_thread(trial.processes)).items():
            if name in MORE:
                known.setdefault(name, time.monotonic() - began)
                if each["dispatches"]:
                    served.setdefault(name, time.monotonic() - began)
        await asyncio.sleep(0.05)
    await adding
    first = [served[name] - known[name] for name in served]
    return {
        "known to the coordinator": _median(known.values()),
        "first request": _median(first),
        **{
            f"start, {phase}": _median(found.values())
            for phase, found in (await asyncio.to_thread(trial.cluster.start_phases, MORE)).items()
        },
    }


def _median(values: Collection[float]) -> float:
    return round(statistics.median(values), 1)


async def play(trial: Trial) -> dict[str, Any]:
    """Return what was seen."""
    streams, report = trial.streams, trial.report
    report["seconds from nothing to ready"] = await trial.up(2, 2)
    await trial.serves("2P2D", HOME, {})
    began = time.monotonic()
    await streams.expect()
    streams.act = "nothing"
    running = asyncio.create_task(streams.run())
    await asyncio.sleep(PAUSE_S)
    await acts(trial)
    streams.stop.set()
    await asyncio.wait_for(running, 120)
    report["longest pause of a stream in seconds, by what was done"] = {
        act: round(pause, 1) for act, pause in streams.longest.items() if act
    }
    report["streams at a time"], report["seconds"] = NUM_STREAMS, round(time.monotonic() - began)
    await trial.up(2, 2, "--stop")
    return {**report, **streams.counts, "problems": streams.problems[:5]}


def main() -> int:
    inside()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    on, record = sys.argv[1:]
    with nodes(NODES), tempfile.TemporaryDirectory(prefix=f"{on}-") as name:
        folder = Path(name)
        trial = Trial(on, folder)
        try:
            found = asyncio.run(play(trial))
        except BaseException:
            for log in sorted(
                [*folder.glob("run/*.log"), *folder.glob("*.out"), *folder.glob("slurmctld.log")]
            ):
                print(f"--- {log.name}\n{log.read_text()[-2500:]}", file=sys.stderr)
            print(json.dumps(trial.report, indent=2), trial.streams.counts, file=sys.stderr)
            raise
        finally:
            trial.site.close()
    result = {"environment": environment(), **trial.site.about, **found}
    print(json.dumps(result, indent=2))
    Path(record).write_text(json.dumps(result, indent=2) + "\n")
    return 1 if found["different"] or found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
