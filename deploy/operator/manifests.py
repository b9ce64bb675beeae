"""A cluster's objects: the Helm chart rendered with the resource's values; a StatefulSet a pool and revision.

The revision is a hash of the pods that the chart renders: whatever changes a worker's pod is a new revision,
and the number of workers is not part of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "kubernetes" / "chart"
GROUP, VERSION, PLURAL = "serving.splitserve", "v1alpha1", "splitserveclusters"
MANAGER = "splitserve-operator"
REVISION, POOL, WORKERS = "splitserve/revision", "splitserve/pool", "splitserve/workers"
ROLES = ("prefill", "decode")

Object = dict[str, Any]


class InvalidValues(Exception):
    """The chart's refusal of the values, in Helm's words."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool as the resource wants it."""

    role: str  # prefill, decode or mixed; of flexible workers: the one that they start with
    flexible: bool
    replicas: int
    least: int  # bounds for the pool controller
    most: int


@dataclass(frozen=True, slots=True)
class Manifests:
    """Everything that a resource asks for."""

    values: Object
    objects: list[Object]  # without StatefulSets
    stateful_sets: dict[str, Object]  # by pool
    pools: dict[str, PoolSpec]
    revision: str


async def render(cluster: Object, plan: Object, helm: str = "helm") -> Manifests:
    """Render a SplitserveCluster. ``plan``: values that its own ones go before. Raises InvalidValues."""
    metadata, spec = cluster["metadata"], cluster["spec"]
    given = merged(plan, spec.get("values") or {})
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    values = without_nulls(merged(defaults, given))
    pools = {name: _pool(name, pool) for name, pool in values["pools"].items()}
    own = {name: {"autoscale": None} for name, pool in values["pools"].items() if "autoscale" in pool}
    if spec.get("ratio") == "Controller":
        _check_controller(values, pools)
    rendered = await _helm(helm, metadata, merged(given, {"pools": own}))
    owner = {
        "apiVersion": cluster["apiVersion"],
        "kind": cluster["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }
    for found in rendered:
        found["metadata"] |= {"namespace": metadata["namespace"], "ownerReferences": [owner]}
        found["metadata"]["labels"]["app.kubernetes.io/managed-by"] = MANAGER
    sets = {o["metadata"]["name"]: o for o in rendered if o["kind"] == "StatefulSet"}
    templates = {name: found["spec"]["template"] for name, found in sets.items()}
    revision = hashlib.sha256(json.dumps(templates, sort_keys=True).encode()).hexdigest()[:6]
    for found in sets.values():
        _of_revision(found, revision)
    return Manifests(
        values,
        [found for found in rendered if found["kind"] != "StatefulSet"],
        {found["spec"]["template"]["metadata"]["labels"][POOL]: found for found in sets.values()},
        pools,
        revision,
    )


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Object:
    """Return ``base`` with the values of ``over`` in it, as Helm merges values; null stays null."""
    found = dict(base)
    for name, value in over.items():
        before = found.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        found[name] = merged(before, value) if both else value  # type: ignore[arg-type]
    return found


def without_nulls(values: Mapping[str, Any]) -> Object:
    """Return the values without those that null removes."""
    return {
        name: without_nulls(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }


def _pool(name: str, pool: Mapping[str, Any]) -> PoolSpec:
    if pool.get("leaderWorkerSet"):
        raise InvalidValues(
            f"pool {name}: leaderWorkerSet is for helm; the operator's pools are StatefulSets"
        )
    role, options = pool.get("role"), pool.get("options") or {}
    flexible = role == "worker" and options.get("start_as") != "mixed" and not options.get("borrow")
    bounds = pool.get("autoscale") or {}
    return PoolSpec(
        options.get("start_as", "decode") if role == "worker" else str(role),
        flexible,
        pool.get("replicas", 1),
        bounds.get("min", 1),
        bounds.get("max", 1 << 16),
    )


def _check_controller(values: Object, pools: Mapping[str, PoolSpec]) -> None:
    """Check that the pool controller can decide the ratio. Raises InvalidValues."""
    if not values["steering"]["slo"] or values["coordinator"]["replicas"] != 1:
        raise InvalidValues(
            "ratio: Controller needs values.steering.slo, and values.coordinator.replicas: 1, because the "
            "pool controller must see the whole load"
        )
    if sorted(pool.role for pool in pools.values()) != sorted(ROLES):
        raise InvalidValues("ratio: Controller needs one pool that starts as prefill and one as decode")


async def _helm(helm: str, metadata: Object, values: Object) -> list[Object]:
    command = [helm, "template", metadata["name"], str(CHART), "--namespace", metadata["namespace"]]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--values=-",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", ""), "HOME": "/tmp"},
    )
    out, error = await process.communicate(yaml.safe_dump(values).encode())
    if process.returncode:
        raise InvalidValues(error.decode(errors="replace").strip()[-1000:])
    return [found for found in yaml.safe_load_all(out) if found]


def _of_revision(found: Object, revision: str) -> None:
    """Make a pool's StatefulSet that of one revision."""
    metadata, spec = found["metadata"], found["spec"]
    metadata["name"] += f"-{revision}"
    for labels in (
        metadata["labels"],
        spec["selector"]["matchLabels"],
        spec["template"]["metadata"]["labels"],
    ):
        labels[REVISION] = revision
    metadata["labels"][POOL] = spec["template"]["metadata"]["labels"][POOL]
