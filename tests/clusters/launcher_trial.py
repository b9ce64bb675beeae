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
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import httpx
from namespaces import cut, inside, join, node_of, nodes
from resuming_load import NUM_STREAMS, Streams
from sites import NODES, OnRay, OnSlurm, Site
from watch import Cluster, wait_for

from splitserve.bench.environment import environment
from splitserve.transport.messages.fields import WIRE_VERSION

PAUSE_S = 8.0
HOME = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
MORE = {f"{role}-{number}" for role in ("prefill", "decode") for number in (2, 3)}


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
    assert await asyncio.to_thread(trial.cluster.chat, "What does os.path.join do?")
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
