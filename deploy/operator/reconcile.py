"""One pass over one SplitserveCluster.

read      the resource, its StatefulSets, and where roles may flip the coordinator
decide    ``rollout.py``
do        flips first; then StatefulSets, unless they were changed meanwhile; then all other objects
report    the status, where it differs
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import yaml

from .coordinator import Coordinator, State
from .kubernetes import RESOURCES, ApiError, Kubernetes
from .manifests import (
    MANAGER,
    POOL,
    REVISION,
    ROLES,
    WORKERS,
    InvalidValues,
    Manifests,
    Object,
    merged,
    render,
)
from .rollout import Pool, Replicas, flips, following, next_replicas, resized
from .status import progress, status_with

COORDINATOR_TIMEOUT_S = 5.0
REPAIR_S = 300.0  # after which objects are applied again, whatever has changed them


class Reconciler:
    """Brings the clusters of a namespace to their resources' specifications."""

    def __init__(self, kubernetes: Kubernetes, coordinator_url: Callable[[str], str]) -> None:
        """``coordinator_url``: by the cluster's name."""
        self._kubernetes, self._coordinator_url = kubernetes, coordinator_url
        self._http = httpx.AsyncClient(timeout=COORDINATOR_TIMEOUT_S, trust_env=False)
        self._rendered: dict[str, tuple[Object, Manifests]] = {}  # by cluster, with what they were made of
        self._applied: dict[str, tuple[str, float]] = {}  # digest and time, by cluster

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()
        await self._kubernetes.close()

    async def run(self, name: str) -> bool:
        """Make one pass; return whether there is such a cluster. Raises ApiError, httpx.HTTPError."""
        cluster = await self._kubernetes.cluster(name)
        if cluster is None:
            self._applied.pop(name, None)
            self._rendered.pop(name, None)
            return False
        try:
            await self._advance(name, cluster, await self._render(name, cluster))
        except InvalidValues as error:
            await self._report(cluster, "Invalid", str(error), {})
        except ApiError as error:
            if error.status == 409:
                raise
            await self._report(cluster, "Failing", str(error), {})
            raise
        return True

    async def _render(self, name: str, cluster: Object) -> Manifests:
        """Return its manifests, rendered anew where anything has changed. Raises InvalidValues."""
        plan = await self._plan(cluster)
        source = {"spec": cluster["spec"], "uid": cluster["metadata"]["uid"], "plan": plan}
        before = self._rendered.get(name)
        if before is None or before[0] != source:
            before = self._rendered[name] = source, await render(cluster, plan)
        return before[1]

    async def _plan(self, cluster: Object) -> Object:
        """Return the values that `splitserve plan` has written. Raises InvalidValues."""
        name = cluster["spec"].get("planConfigMap")
        if not name:
            return {}
        try:
            texts = (await self._kubernetes.data("configmaps", name)).values()
        except ApiError as error:
            raise InvalidValues(f"planConfigMap: {error}") from None
        if len(texts) != 1:
            raise InvalidValues(
                f"planConfigMap: {name} has {len(texts)} files; give it one, the plan's values"
            )
        return dict(yaml.safe_load(*texts))

    async def _advance(self, name: str, cluster: Object, manifests: Manifests) -> None:
        labels = f"app.kubernetes.io/instance={name},app.kubernetes.io/managed-by={MANAGER}"
        sets = {_key(found): found for found in await self._kubernetes.list("StatefulSet", labels)}
        current = {pool for pool, revision in sets if revision == manifests.revision}
        rolling = any(revision != manifests.revision for _, revision in sets)
        state, trouble = (None, "") if rolling or not sets else await self._state(name, cluster, manifests)
        workers = self._workers(cluster, manifests, sets, state)
        if rolling:
            new = [_pool(sets, pool, manifests.revision, count) for pool, count in workers.items()]
            old = [_pool(sets, *key) for key in sets if key[1] != manifests.revision]
            replicas = next_replicas(new, old, cluster["spec"].get("surge", True))
        else:
            replicas = {(pool, manifests.revision): count for pool, count in workers.items()}
            flexible = [
                pool for pool in manifests.pools if manifests.pools[pool].flexible and pool in current
            ]
            before = {pool: sets[pool, manifests.revision]["spec"]["replicas"] for pool in flexible}
            for pool, count in resized(before, {pool: workers[pool] for pool in flexible}).items():
                replicas[pool, manifests.revision] = count
        pending = 0
        if state is not None and cluster["spec"].get("ratio") != "Controller":
            pending, trouble = await self._flip(name, cluster, manifests, state, workers, replicas)
        await self._scale(manifests, sets, replicas, workers)
        trouble = await self._apply(name, labels, manifests, hold=rolling) or trouble
        pools = [_pool(sets, *key, workers.get(key[0], 0)) for key in sorted({*sets, *replicas})]
        phase, message, fields = progress(manifests, pools, state, pending)
        await self._report(cluster, phase, trouble or message, fields)

    async def _state(self, name: str, cluster: Object, manifests: Manifests) -> tuple[State | None, str]:
        """Ask the coordinator, where its answer matters. Return a sentence where it gives none."""
        by_controller = cluster["spec"].get("ratio") == "Controller"
        if not by_controller and not any(pool.flexible for pool in manifests.pools.values()):
            return None, ""
        try:
            return await (await self._coordinator(name, manifests)).state(), ""
        except httpx.HTTPError as error:
            return None, f"the coordinator does not answer: {error}"

    async def _coordinator(self, name: str, manifests: Manifests) -> Coordinator:
        secret = await self._kubernetes.data("secrets", manifests.values["adminKeySecret"])
        key = base64.b64decode(secret["admin.key"]).decode().strip()
        return Coordinator(self._http, self._coordinator_url(name), key)

    def _workers(
        self,
        cluster: Object,
        manifests: Manifests,
        sets: Mapping[tuple[str, str], Object],
        state: State | None,
    ) -> dict[str, int]:
        """Return the number of workers of each pool, as the values or the pool controller want it."""
        given = {name: pool.replicas for name, pool in manifests.pools.items()}
        if cluster["spec"].get("ratio") != "Controller":
            return given
        newest = sorted(sets, key=lambda key: key[1] == manifests.revision)
        before = given | {pool: _wanted(sets[pool, revision]) for pool, revision in newest if pool in given}
        if state is None:
            return before
        bounds = {name: (pool.role, pool.least, pool.most) for name, pool in manifests.pools.items()}
        return following(before, bounds, state.wanted, sum(not w.is_draining for w in state.workers))

    async def _flip(
        self,
        name: str,
        cluster: Object,
        manifests: Manifests,
        state: State,
        workers: Mapping[str, int],
        replicas: Replicas,
    ) -> tuple[int, str]:
        """Have workers change their roles. Return how many, and what kept one from it."""
        wanted = dict.fromkeys(ROLES, 0)
        may_flip = set()
        for pool, spec in manifests.pools.items():
            if spec.role in wanted:
                wanted[spec.role] += workers[pool]
            if spec.flexible:
                stateful_set = manifests.stateful_sets[pool]["metadata"]["name"]
                may_flip |= {f"{stateful_set}-{n}" for n in range(replicas[pool, manifests.revision])}
        changes, trouble = flips(state.workers, wanted, may_flip), ""
        for process, role in changes:
            try:
                await (await self._coordinator(name, manifests)).flip(process, role)
            except httpx.HTTPError as error:
                trouble = f"{process} does not become a {role} worker: {error}"
        return len(changes), trouble

    async def _scale(
        self,
        manifests: Manifests,
        sets: Mapping[tuple[str, str], Object],
        replicas: Replicas,
        workers: Mapping[str, int],
    ) -> None:
        """Bring the StatefulSets to these replicas; delete those of old revisions whose pods are gone."""
        old_first = sorted(replicas.items(), key=lambda item: item[0][1] == manifests.revision)
        for (pool, revision), count in old_first:
            note = {WORKERS: str(workers[pool])} if revision == manifests.revision else {}
            found = sets.get((pool, revision))
            if found is None:
                base, spec = manifests.stateful_sets[pool], {"replicas": count}
                found = merged(base, {"metadata": {"annotations": note}, "spec": spec})
                await self._kubernetes.apply(found)
            elif _is_over(found) and not note:
                await self._kubernetes.delete("StatefulSet", found["metadata"]["name"])
            elif found["spec"]["replicas"] != count or not note.items() <= _annotations(found).items():
                changes = {"metadata": {"annotations": note}, "spec": {"replicas": count}}
                await self._kubernetes.patch(found, changes)

    async def _apply(self, name: str, labels: str, manifests: Manifests, hold: bool) -> str:
        """Apply all other objects and delete those that are not wanted any more. Return a sentence about
        kinds that are not installed. ``hold``: coordinators keep their revision until the workers have
        changed theirs."""
        content = json.dumps([manifests.objects, hold], sort_keys=True)
        digest, now = hashlib.sha256(content.encode()).hexdigest(), time.monotonic()
        before, at = self._applied.get(name, ("", 0.0))
        if digest == before and now - at < REPAIR_S:
            return ""
        missing = ""
        for found in manifests.objects:
            if not (hold and found["kind"] == "Deployment"):
                try:
                    await self._kubernetes.apply(found)
                except ApiError as error:
                    if error.status != 404:
                        raise
                    missing = f"{found['kind']} ({found['apiVersion']}) is not installed in this cluster"
        wanted = {(found["kind"], found["metadata"]["name"]) for found in manifests.objects}
        for kind in RESOURCES.keys() - {"StatefulSet"}:
            for found in await self._kubernetes.list(kind, labels):
                if (kind, found["metadata"]["name"]) not in wanted:
                    await self._kubernetes.delete(kind, found["metadata"]["name"])
        if not missing:
            self._applied[name] = digest, now
        return missing

    async def _report(self, cluster: Object, phase: str, message: str, fields: Object) -> None:
        before = cluster.get("status") or {}
        after = status_with(before, phase, message, fields, cluster["metadata"]["generation"])
        if after != before:
            await self._kubernetes.set_status(cluster, after)


def _key(found: Object) -> tuple[str, str]:
    labels = found["metadata"]["labels"]
    return labels[POOL], labels[REVISION]


def _annotations(found: Object) -> dict[str, Any]:
    return found["metadata"].get("annotations") or {}


def _wanted(found: Object) -> int:
    return int(_annotations(found).get(WORKERS, found["spec"]["replicas"]))


def _pool(
    sets: Mapping[tuple[str, str], Object], name: str, revision: str, workers: int | None = None
) -> Pool:
    """Return a pool as its StatefulSet has it. ``workers``: in full; by default as it was."""
    found = sets.get((name, revision))
    if found is None:
        return Pool(name, revision, workers or 0)
    status = found.get("status") or {}
    return Pool(
        name,
        revision,
        _wanted(found) if workers is None else workers,
        found["spec"]["replicas"],
        status.get("readyReplicas", 0),
        status.get("replicas", 0),
    )


def _is_over(found: Object) -> bool:
    """Return whether a StatefulSet wants no pod and has none."""
    status = found.get("status") or {}
    seen = status.get("observedGeneration") == found["metadata"]["generation"]
    return seen and not found["spec"]["replicas"] and not status.get("replicas")
