"""A world for the operator: an API server with state, StatefulSets' controllers, a coordinator, and kopf."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import kopf
from aiohttp import web

from splitserve.deploy.operator.kubernetes import Kubernetes
from splitserve.deploy.operator.main import Operator
from splitserve.deploy.operator.reconcile import Reconciler

from .fake_kubernetes import NAMESPACE, FakeKubernetes
from .kubernetes import MINIMAL

PATIENCE_S = 100.0  # on a machine with other work
ADMIN_KEY = "0123456789abcdef"
Values = dict[str, Any]


def cluster(values: Values, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "serving.splitserve/v1alpha1",
        "kind": "SplitserveCluster",
        "metadata": {"name": "demo", "namespace": NAMESPACE},
        "spec": {"values": {**MINIMAL, **values}, **spec},
    }


class FakeCoordinator:
    """Idle workers, by process; flips take effect at once."""

    def __init__(self) -> None:
        self.roles: dict[str, str] = {}
        self.wanted: dict[str, int] = {}
        self.flips: list[tuple[str, str]] = []
        self.url = ""

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/debug/state", self._state)
        app.router.add_post("/admin/flip/{process}", self._flip)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = site.name
        return runner

    async def _state(self, request: web.Request) -> web.Response:
        assert request.headers["authorization"] == f"Bearer {ADMIN_KEY}"
        workers = [
            {"process": process, "role": role, "draining": False, "dispatches": []}
            for process, role in sorted(self.roles.items())
        ]
        return web.json_response({"workers": workers, "steering": {"wanted_workers": self.wanted}})

    async def _flip(self, request: web.Request) -> web.Response:
        process, role = request.match_info["process"], request.query["to"]
        self.flips.append((process, role))
        self.roles[process] = role
        return web.json_response({})


class CountedReconciler(Reconciler):
    """``num_passes``: that are over, and raised nothing."""

    num_passes = 0

    async def run(self, name: str) -> bool:
        found = await super().run(name)
        self.num_passes += 1
        return found


class World:
    """The API server, StatefulSets' controllers whose pods start and end one at a time, and a coordinator."""

    def __init__(self, seed: int = 0) -> None:
        self.api, self.coordinator = FakeKubernetes(), FakeCoordinator()
        self.broken: set[str] = set()  # revisions whose pods never become ready
        self.down: set[str] = set()  # pods whose worker is not connected
        self.every_s = 0.05  # between the operator's passes
        self.must_serve = False
        """Whether every moment without a ready pair is an error."""
        self._random = random.Random(seed)
        self._reconciler: CountedReconciler | None = None  # the newest operator's

    def sets(self) -> dict[str, dict[str, Any]]:
        return self.api.of_kind("statefulsets")

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.objects["splitserveclusters", "demo"].get("status", {})
        return found

    def revision(self) -> str:
        return str(self.status()["revision"])

    def replicas(self) -> dict[str, int]:
        """By pool, over all revisions."""
        found: dict[str, int] = {}
        for each in self.sets().values():
            pool = each["metadata"]["labels"]["splitserve/pool"]
            found[pool] = found.get(pool, 0) + each["spec"]["replicas"]
        return found

    async def run(self) -> None:
        """Be the cluster: start, make ready or end one pod at a time, in any order."""
        while True:
            await asyncio.sleep(0.002)
            changes = [
                (name, pods, ready)
                for name, found in self.sets().items()
                for pods, ready in self._next(found)
            ]
            if changes:
                await self.api.set_pods(*self._random.choice(changes))
                self.play_workers()
                assert not self.must_serve or self.has_pair(), self.sets()

    def _next(self, found: dict[str, Any]) -> list[tuple[int, int]]:
        status = found.get("status", {})
        pods, ready, wanted = (
            status.get("replicas", 0),
            status.get("readyReplicas", 0),
            found["spec"]["replicas"],
        )
        options = []
        if pods < wanted:
            options.append((pods + 1, ready))
        if pods > wanted:
            options.append((pods - 1, min(ready, pods - 1)))
        if ready < pods and found["metadata"]["labels"]["splitserve/revision"] not in self.broken:
            options.append((pods, ready + 1))
        if not options and status.get("observedGeneration") != found["metadata"]["generation"]:
            options.append((pods, ready))
        return options

    def play_workers(self) -> None:
        """Connect the workers of ready pods, and drop those of the others."""
        ready = {
            f"{name}-{number}": found["metadata"]["labels"]["splitserve/pool"]
            for name, found in self.sets().items()
            for number in range(found.get("status", {}).get("readyReplicas", 0))
        }
        roles = self.coordinator.roles
        self.coordinator.roles = {
            process: roles.get(process, pool) for process, pool in ready.items() if process not in self.down
        }

    async def put_admin_key(self) -> None:
        await self.api.put(
            "secrets",
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "splitserve-admin-key"},
                "data": {"admin.key": b64encode(ADMIN_KEY.encode()).decode()},
            },
        )

    def has_pair(self) -> bool:
        """Whether some revision has a ready worker of each role."""
        ready: dict[str, set[str]] = {}
        for found in self.sets().values():
            labels = found["metadata"]["labels"]
            if found.get("status", {}).get("readyReplicas", 0):
                ready.setdefault(labels["splitserve/revision"], set()).add(labels["splitserve/pool"])
        return any(pools == {"prefill", "decode"} for pools in ready.values())

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.status()}, {self.replicas()}"
            await asyncio.sleep(0.01)

    async def until_serving(self, **replicas: int) -> None:
        await self.until(
            f"it serves with {replicas}",
            lambda: (
                self.status().get("phase") == "Serving"
                and self.replicas() == replicas
                and self.status()["observedGeneration"] == self.generation()
            ),
        )

    async def more_passes(self) -> None:
        """Wait until the operator has made three passes that began after this call."""
        assert self._reconciler is not None, "an operator runs"
        enough = self._reconciler.num_passes + 4  # one may have begun before
        await self.until(
            "more passes", lambda: self._reconciler is not None and self._reconciler.num_passes >= enough
        )

    def generation(self) -> int:
        return int(self.api.objects["splitserveclusters", "demo"]["metadata"]["generation"])

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[None]:
        """Run the operator; stop it at the end, as a pod is stopped."""
        info = kopf.ConnectionInfo(server=self.api.url, default_namespace=NAMESPACE)
        self._reconciler = CountedReconciler(
            Kubernetes(lambda: info, NAMESPACE), lambda _: self.coordinator.url
        )
        operator = Operator(self._reconciler, self.every_s)
        registry, stop = operator.registry(), threading.Event()
        kopf.on.login(registry=registry)(lambda **_: info)
        options = {"registry": registry, "namespaces": [NAMESPACE], "standalone": True, "stop_flag": stop}
        task = asyncio.create_task(asyncio.to_thread(kopf.run, **options))
        try:
            yield
        finally:
            stop.set()
            async with asyncio.timeout(PATIENCE_S):
                await task


@asynccontextmanager
async def world(seed: int = 0) -> AsyncIterator[World]:
    found = World(seed)
    runners = [await found.api.start(), await found.coordinator.start()]
    await found.put_admin_key()
    playing = asyncio.create_task(found.run())
    try:
        yield found
        assert not playing.done(), playing.exception()
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        for runner in runners:
            await runner.cleanup()
