"""The Kubernetes operator at work on real processes: flips by a real coordinator, a rollout under load."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e import paced
from e2e.cluster import MODEL_NAME, START_S, Cluster, wait_for
from e2e.test_failure import Streams
from e2e.test_kubernetes import ADMIN_KEY, Chart, state
from support.kubernetes import HELM
from support.pods import Pods, can_stand_in

from splitserve.transport.channels.keys import generate_key
from splitserve.transport.process.private_files import write_private

pytest.importorskip("kopf")
pytest.importorskip("kubernetes_validate")
from support.operator_world import World, cluster

pytestmark = [
    pytest.mark.skipif(not HELM, reason="helm is not installed"),
    pytest.mark.skipif(not can_stand_in(), reason="no namespaces can be made here"),
]
PROMPTS, NUM_TOKENS, STEP_S = [f"pod {number}" for number in range(3)], 60, 0.1


class Node(World):
    """The controllers of StatefulSets and a kubelet: pods are processes."""

    def __init__(self, pods: Pods) -> None:
        super().__init__()
        self.pods, self.every_s = pods, 1.0
        self._ending: dict[str, Future[int]] = {}
        self._threads = ThreadPoolExecutor(8)
        self.statuses: list[int] = []
        """Exit statuses of pods that were deleted."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            found = self.api.of_kind("deployments") | self.sets()
            self.pods.know([*found.values(), *self.api.of_kind("services").values()])
            for name in found:
                await self._sync(name, found[name])
            if (coordinator := self.pods.running.get("demo-coordinator-0")) is not None:
                self.coordinator.url = f"http://{coordinator.address}:8000"
            assert not self.must_serve or self.has_pair(), self.sets()

    async def _sync(self, name: str, found: dict[str, Any]) -> None:
        running = [pod for pod in self.pods.running if pod.rpartition("-")[0] == name]
        for number in range(found["spec"]["replicas"]):
            if f"{name}-{number}" not in running:
                self.pods.start(name, number)
        for pod in running:
            if int(pod.rpartition("-")[2]) >= found["spec"]["replicas"] and pod not in self._ending:
                self._ending[pod] = self._threads.submit(self.pods.running[pod].delete)
        for pod, ending in list(self._ending.items()):
            if ending.done():
                self.statuses.append(ending.result())
                self.pods.forget(pod)
                del self._ending[pod]
        if found["kind"] == "StatefulSet":
            pods = [self.pods.running[p] for p in self.pods.running if p.rpartition("-")[0] == name]
            staying = [pod for pod in pods if pod.name not in self._ending]
            probes = [asyncio.to_thread(pod.passes, "readinessProbe") for pod in staying]
            ready = sum(await asyncio.gather(*probes))
            await self.api.set_pods(name, len(pods), ready)


class Operated:
    """The node and the operator, in a thread of their own."""

    def __init__(self, node: Node) -> None:
        self.node, self._loop = node, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._stop = asyncio.Event()
        self._done = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    async def _run(self) -> None:
        runner = await self.node.api.start()
        playing = asyncio.create_task(self.node.run())
        try:
            async with self.node.operator():
                await asyncio.wait(
                    {playing, asyncio.create_task(self._stop.wait())}, return_when="FIRST_COMPLETED"
                )
            assert not playing.done(), playing.exception()
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            await runner.cleanup()

    def do(self, what: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(30)

    def wait(self, what: str, **expected: object) -> None:
        def settled() -> bool:
            assert not self._done.done(), self._done.exception()
            found = self.node.status()
            return expected.items() <= found.items() and found["observedGeneration"] == self.node.generation()

        wait_for(f"{what}: {self.node.status()}", settled, START_S)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        try:
            self._done.result(60)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(30)
            self._loop.close()


def values(folder: Path, prefill: int, decode: int, revision: str) -> dict[str, Any]:
    counts = {"prefill": prefill, "decode": decode}
    return {
        "model": {"name": f"/models/{paced.MODEL.name}", "servedName": MODEL_NAME},
        "coordinator": {"replicas": 1, "openAccess": True, "options": {"dead_after_s": 60}},
        "workerOptions": {"runner": paced.paced_runner(folder / "profile.json", 0.01, STEP_S)},
        "pools": {
            role: {
                "role": "worker",
                "replicas": count,
                "options": {"start_as": role},
                "env": [{"name": "REVISION", "value": revision}],
            }
            for role, count in counts.items()
        },
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("cluster", "admin"):
        (tmp_path / name).mkdir()
    generate_key(tmp_path / "cluster" / "cluster.key")
    write_private(tmp_path / "admin" / "admin.key", ADMIN_KEY)
    return tmp_path


@pytest.fixture
def operated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operated]:
    monkeypatch.setenv("PATH", f"{Path(HELM).parent}:{os.environ['PATH']}")
    paths = {
        "/etc/splitserve/cluster": str(folder / "cluster"),
        "/etc/splitserve/admin": str(folder / "admin"),
        "/models": str(paced.MODEL.parent),
    }
    pods = Pods([], folder, paths)
    operated = Operated(Node(pods))
    try:
        yield operated
    finally:
        try:
            operated.end()
        finally:
            pods.kill_all()


@pytest.mark.timeout(600)  # eight processes, one after the other
def test_flips_and_a_rollout_under_load_lose_no_token(operated: Operated, folder: Path) -> None:
    node = operated.node
    operated.do(node.put_admin_key())
    operated.do(node.api.put("splitserveclusters", cluster(values(folder, 1, 2, "1"))))
    operated.wait("1P:2D", phase="Serving", ratio="1P:2D")
    here: Cluster = Chart(node.pods, 0)
    node.pods.running["demo-coordinator-0"].wait_ready()
    expected = Streams(here, PROMPTS, NUM_TOKENS, seed=7).texts()
    started, first = node.pods.num_started, node.revision()

    streams = Streams(here, PROMPTS, NUM_TOKENS, seed=7)
    streams.wait_under_way(3)
    operated.do(node.api.put("splitserveclusters", cluster(values(folder, 2, 1, "1"))))
    operated.wait("a decode worker has become a prefill worker", phase="Serving", ratio="2P:1D")
    assert streams.texts() == expected
    assert node.pods.num_started == started, "no pod was started for that"

    streams = Streams(here, PROMPTS, NUM_TOKENS, seed=7)
    streams.wait_under_way(3)
    node.must_serve = True
    operated.do(node.api.put("splitserveclusters", cluster(values(folder, 1, 1, "2"))))
    operated.wait("the new revision serves alone", phase="Serving", ratio="1P:1D")
    assert streams.texts() == expected
    assert state(here)["redispatches"] == 0, "sequences have moved with their KV blocks"
    assert node.revision() != first
    assert node.statuses == [0] * 3, "all workers of the old revision have drained"
