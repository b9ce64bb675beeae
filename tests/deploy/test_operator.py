"""The Kubernetes operator, run by kopf against an API server with state (``support/fake_kubernetes.py``)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.kubernetes import HELM

pytest.importorskip("kopf")
pytest.importorskip("kubernetes_validate")
from support.kubernetes_schemas import INSTALL, check_valid
from support.operator_world import cluster, world

from splitserve.deploy.operator.kubernetes import RESOURCES
from splitserve.deploy.operator.main import Operator
from splitserve.deploy.operator.reconcile import Reconciler

pytestmark = pytest.mark.skipif(not HELM, reason="helm is not installed")
VERSIONS = ("1.35", "1.36", "1.37")
FLEXIBLE = {
    "prefill": {"role": "worker", "options": {"start_as": "prefill"}},
    "decode": {"role": "worker", "options": {"start_as": "decode"}},
}
CONTROLLED = {
    "steering": {"slo": "ttft=2,tpot=0.05@p90", "profileConfigMap": "profile"},
    "coordinator": {"replicas": 1, "openAccess": True},
    "pools": {"prefill": {"autoscale": {"min": 1, "max": 3}}, "decode": {"autoscale": {"min": 1, "max": 4}}},
}


@pytest.fixture(autouse=True)
def _helm_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(HELM).parent}:{os.environ['PATH']}")


async def test_a_resource_becomes_valid_objects_and_its_end_leaves_nothing() -> None:
    async with world() as here, here.operator():
        monitored = {"monitoring": {"serviceMonitor": True, "alerts": True, "dashboard": True}}
        created = await here.api.put("splitserveclusters", cluster(monitored))
        await here.until_serving(prefill=2, decode=2)
        kinds = {plural for plural, _ in here.api.objects}
        assert kinds >= {
            "deployments",
            "services",
            "networkpolicies",
            "poddisruptionbudgets",
            "servicemonitors",
        }
        for (plural, _), found in here.api.objects.items():
            for version in VERSIONS:
                check_valid(found, version)
            if plural not in ("secrets", "splitserveclusters"):
                [owner] = found["metadata"]["ownerReferences"]
                assert owner["uid"] == created["metadata"]["uid"]
        assert here.status()["ratio"] == "2P:2D"
        [condition] = here.status()["conditions"]
        assert (condition["type"], condition["status"]) == ("Ready", "True")
        assert "finalizers" not in here.api.objects["splitserveclusters", "demo"]["metadata"]

        await here.api.put("splitserveclusters", cluster({"monitoring": {"alerts": False}}))
        await here.until("the rule is gone", lambda: not here.api.of_kind("prometheusrules"))
        assert here.api.of_kind("servicemonitors"), "that is still wanted"

        await here.api.remove("splitserveclusters", "demo")
        await asyncio.sleep(0.3)  # several passes: none may bring anything back
        assert [plural for plural, _ in here.api.objects] == ["secrets"]


async def test_fixed_pools_follow_the_ratio_and_nothing_else_is_written() -> None:
    async with world() as here, here.operator():
        await here.api.put("splitserveclusters", cluster({}))
        await here.until_serving(prefill=2, decode=2)
        revision, here.must_serve = here.revision(), True
        here.api.writes.clear()
        pools = {"prefill": {"replicas": 1}, "decode": {"replicas": 3}}
        await here.api.put("splitserveclusters", cluster({"pools": pools}))
        await here.until_serving(prefill=1, decode=3)
        assert here.revision() == revision, "a change of the ratio restarts no worker"
        assert here.api.writes["PATCH", "statefulsets"] == 2
        assert not here.api.writes["PATCH", "deployments"]


async def test_flexible_workers_flip_where_the_ratio_changes_and_only_the_rest_are_pods() -> None:
    async with world() as here, here.operator():
        await here.api.put("splitserveclusters", cluster({"pools": FLEXIBLE}))
        await here.until_serving(prefill=2, decode=2)
        here.must_serve = True
        counts = {"prefill": 1, "decode": 4}
        changed = {name: {**pool, "replicas": counts[name]} for name, pool in FLEXIBLE.items()}
        await here.api.put("splitserveclusters", cluster({"pools": changed}))
        await here.until("1P:4D", lambda: here.status()["ratio"] == "1P:4D")
        assert here.replicas() == {"prefill": 2, "decode": 3}, "one more pod, and one flip"
        [(process, role)] = here.coordinator.flips
        assert (process.rpartition("-")[0], role) == (f"demo-prefill-{here.revision()}", "decode")

        here.coordinator.roles[process] = "prefill"  # as after a restart of its pod
        await here.until("it has flipped again", lambda: len(here.coordinator.flips) == 2)
        await here.until_serving(prefill=2, decode=3)


@pytest.mark.parametrize("ticks", range(6))
async def test_the_operator_stops_although_its_cluster_has_just_changed(ticks: int) -> None:
    class Passes(Reconciler):
        def __init__(self) -> None:
            pass

        async def run(self, name: str) -> bool:
            return True

        async def close(self) -> None:
            pass

    operator = Operator(Passes())
    operator._wake("demo")
    await asyncio.sleep(0.01)  # it waits for the next change
    operator._wake("demo")
    for _ in range(ticks):
        await asyncio.sleep(0)
    async with asyncio.timeout(60):  # against hanging alone
        await operator._stop()


async def test_the_pool_controller_decides_the_ratio_within_bounds() -> None:
    async with world() as here, here.operator():
        await here.api.put("splitserveclusters", cluster(CONTROLLED, ratio="Controller"))
        await here.until_serving(prefill=2, decode=2)
        assert not here.api.of_kind("scaledobjects"), "KEDA would fight the operator"
        here.coordinator.wanted = {"prefill": 1, "decode": 3}
        await here.until_serving(prefill=1, decode=3)
        here.coordinator.wanted = {"prefill": 1, "decode": 9}
        await here.until_serving(prefill=1, decode=4)

        here.down = {f"demo-decode-{here.revision()}-0"}
        here.play_workers()
        here.coordinator.wanted = {"prefill": 1, "decode": 3}
        await here.more_passes()
        assert here.replicas() == {"prefill": 1, "decode": 4}


@pytest.mark.parametrize("seed", range(4))
async def test_a_rollout_brings_both_roles_in_step_and_always_has_a_pair(seed: int) -> None:
    async with world(seed) as here, here.operator():
        surge = bool(seed % 2)
        pools = {"prefill": {"replicas": 2}, "decode": {"replicas": 4}}
        await here.api.put("splitserveclusters", cluster({"pools": pools}, surge=surge))
        await here.until_serving(prefill=2, decode=4)
        before, here.must_serve = here.revision(), True
        start = len(here.api.history)
        await here.api.put(
            "splitserveclusters", cluster({"pools": pools, "image": "splitserve:2"}, surge=surge)
        )
        await here.until_serving(prefill=2, decode=4)
        assert here.revision() != before
        assert all(here.revision() in name for name in here.sets())
        assert here.api.of_kind("deployments")["demo-coordinator"]["spec"]["template"]["spec"]["containers"][
            0
        ]["image"] == ("splitserve:2")
        _check_steps(here.api.history[start:], before, surge)


def _check_steps(history: list[tuple[str, dict[str, Any]]], before: str, surge: bool) -> None:
    """No pool of the new revision runs ahead of the other by more than a step's share, and coordinators
    change last."""
    wanted: dict[tuple[str, bool], int] = {("prefill", False): 2, ("decode", False): 4}
    for _, found in history:
        if found["kind"] == "StatefulSet":
            labels = found["metadata"]["labels"]
            is_new = labels["splitserve/revision"] != before
            wanted[labels["splitserve/pool"], is_new] = found["spec"]["replicas"]
            prefill, decode = wanted.get(("prefill", True), 0), wanted.get(("decode", True), 0)
            assert abs(2 * prefill - decode) <= 2, wanted
            most = 8 if surge else 7
            assert sum(wanted.values()) <= most, wanted
        if found["kind"] == "Deployment":
            assert not any(count for (_, is_new), count in wanted.items() if not is_new)


async def test_a_revision_that_never_becomes_ready_costs_no_worker_and_can_be_taken_back() -> None:
    async with world() as here, here.operator():
        await here.api.put("splitserveclusters", cluster({}))
        await here.until_serving(prefill=2, decode=2)
        good, here.must_serve = here.revision(), True
        here.broken = _AllBut(good)
        await here.api.put("splitserveclusters", cluster({"image": "broken"}))
        await here.until("it tries", lambda: here.replicas() == {"prefill": 3, "decode": 3})
        await here.more_passes()
        assert here.replicas() == {"prefill": 3, "decode": 3}
        assert here.status()["phase"] == "Rolling"
        assert "decode 0/2, prefill 0/2" in here.status()["message"]
        await here.api.put("splitserveclusters", cluster({"image": "splitserve:latest"}))
        await here.until_serving(prefill=2, decode=2)
        assert here.revision() == good


class _AllBut(set[str]):
    def __init__(self, good: str) -> None:
        self._good = good

    def __contains__(self, revision: object) -> bool:
        return revision != self._good


async def test_an_operator_that_ends_in_the_middle_is_continued_by_the_next_one() -> None:
    async with world() as here:
        async with here.operator():
            await here.api.put("splitserveclusters", cluster({}))
            await here.until_serving(prefill=2, decode=2)
            before, here.must_serve = here.revision(), True
            await here.api.put("splitserveclusters", cluster({"image": "splitserve:2"}))
            await here.until("it has begun", lambda: len(here.sets()) == 4)
        assert len(here.sets()) == 4, "the old revision is still there"
        async with here.operator():
            await here.until_serving(prefill=2, decode=2)
        assert here.revision() != before


async def test_two_operators_and_a_failing_api_server_come_to_the_same() -> None:
    async with world() as here, here.operator(), here.operator():
        here.api.faults = [
            ("PATCH .*statefulsets", 500),
            ("PATCH .*services", 503),
            ("GET .*statefulsets", 429),
        ]
        await here.api.put("splitserveclusters", cluster({}))
        await here.until_serving(prefill=2, decode=2)
        here.must_serve = True
        here.api.faults += [("PATCH .*statefulsets", 409), ("PATCH .*status", 409), ("DELETE ", 500)]
        await here.api.put("splitserveclusters", cluster({"image": "splitserve:2"}))
        await here.until_serving(prefill=2, decode=2)
        assert not here.api.faults
        await here.until("the old sets are gone", lambda: len(here.sets()) == 2)


async def test_a_plan_gives_the_pools_and_wrong_values_are_named_in_the_status() -> None:
    async with world() as here, here.operator():
        await here.api.put("splitserveclusters", cluster({"replicas": 3}, planConfigMap="plan"))
        await here.until("it is refused", lambda: here.status().get("phase") == "Invalid")
        assert "'configmaps plan' not found" in here.status()["message"]
        plan = {"pools": {"prefill": {"role": "prefill", "replicas": 1}, "decode": {"replicas": 3}}}
        await here.api.put(
            "configmaps",
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "plan"},
                "data": {"plan-values.yaml": yaml.safe_dump(plan)},
            },
        )
        await here.until("the chart refuses", lambda: "'replicas' not allowed" in here.status()["message"])
        groups = cluster({"pools": {"decode": {"leaderWorkerSet": {"size": 1}}}}, planConfigMap="plan")
        await here.api.put("splitserveclusters", groups)
        await here.until(
            "it refuses groups", lambda: "leaderWorkerSet is for helm" in here.status()["message"]
        )
        assert not here.sets()
        await here.api.put(
            "splitserveclusters", cluster({"replicas": None, "pools": None}, planConfigMap="plan")
        )
        await here.until_serving(prefill=1, decode=3)


async def test_a_kind_that_is_not_installed_is_named_and_the_rest_is_there() -> None:
    async with world() as here, here.operator():
        await here.api.put(
            "splitserveclusters", cluster({"gateway": {"parentRefs": [{"name": "inference"}]}})
        )
        await here.until_serving(prefill=2, decode=2)
        assert "HTTPRoute (gateway.networking.k8s.io/v1) is not installed" in here.status()["message"]


def test_its_own_manifests_are_valid_and_its_role_covers_what_it_does() -> None:
    for found in INSTALL:
        for version in VERSIONS:
            check_valid(found, version)
    [role] = [found for found in INSTALL if found["kind"] == "Role"]
    allowed = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    for version, plural in RESOURCES.values():
        group = version.rpartition("/")[0]
        assert {(group, plural, verb) for verb in ("get", "list", "create", "patch", "delete")} <= allowed
    chart = Path(__file__).parents[2] / "deploy/kubernetes/chart/templates"
    rendered = {
        line.split()[1]
        for path in chart.glob("*.yaml")
        for line in path.read_text().splitlines()
        if line.startswith("kind: ")
    }
    assert rendered - {"ScaledObject", "HorizontalPodAutoscaler", "LeaderWorkerSet"} == RESOURCES.keys()
