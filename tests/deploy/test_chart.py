"""The Kubernetes chart: each manifest that it can render is valid for the last three Kubernetes versions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.kubernetes import CHART, HELM, MINIMAL, ChartError, helm, manifests, pod_specs, pod_template

from splitserve.cli.settings import ServerSettings
from splitserve.coordinator.metrics.system_collector import SystemCollector
from splitserve.coordinator.metrics.system_snapshot import SystemSnapshot
from splitserve.worker.settings import DecodeSettings, FlexibleSettings, PrefillSettings

validate = pytest.importorskip("kubernetes_validate")
pytestmark = pytest.mark.skipif(not HELM, reason="helm is not installed")
VERSIONS = ("1.35", "1.36", "1.37")
CRDS = yaml.safe_load((Path(__file__).parent / "crds.yaml").read_text())
SETTINGS = {
    "coordinator": ServerSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "worker": FlexibleSettings,
}
EVERYTHING: dict[str, Any] = {
    "model": {
        "name": "Qwen/Qwen3-0.6B",
        "revision": "main",
        "servedName": "qwen",
        "volume": {"persistentVolumeClaim": {"claimName": "models"}},
        "secretName": "hub",
    },
    "imagePullSecrets": [{"name": "registry"}],
    "options": {"log_format": "json"},
    "workerOptions": {
        "dtype": "bfloat16",
        "block_size": 64,
        "exact": True,
        "lora_folder": "/models/adapters",
    },
    "coordinator": {
        "replicas": 1,
        "tenantsSecret": "tenants",
        "env": [
            {"name": "SPLITSERVE_REDIS_URL", "valueFrom": {"secretKeyRef": {"name": "redis", "key": "url"}}}
        ],
        "options": {"max_queue": 1_000_000, "ollama": False, "heartbeat_s": 0.5},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "infra", "operator": "Exists"}],
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    },
    "pools": {
        "prefill": {"autoscale": {"min": 1, "max": 8}, "gpus": 2, "options": {"threads": 4}},
        "decode": {
            "autoscale": {"min": 2, "max": 8},
            "gpus": 1,
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "env": [{"name": "A", "value": "b"}],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        },
        "flexible": {"role": "worker", "replicas": 1, "options": {"start_as": "prefill"}},
    },
    "steering": {
        "slo": "ttft=2,tpot=0.05@p90",
        "mode": "act",
        "profileConfigMap": "profile",
        "maxWorkers": 12,
    },
    "monitoring": {"serviceMonitor": True, "alerts": True, "dashboard": True, "labels": {"a": "b"}},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}],
        "egress": [{"ports": [{"port": 6379}]}],
    },
    "gateway": {
        "parentRefs": [{"name": "inference"}],
        "hostnames": ["llm.example.org"],
        "endpointPicker": "picker",
    },
}
GROUPS = {
    **EVERYTHING,
    "pools": {name: {**pool, "leaderWorkerSet": {"size": 1}} for name, pool in EVERYTHING["pools"].items()},
}
MATRIX = {
    "minimal": MINIMAL,
    "everything": EVERYTHING,
    "hpa": {**EVERYTHING, "autoscaling": {"type": "hpa"}},
    "groups": GROUPS,
    "object store": {**MINIMAL, "model": {"name": "s3://models/llama"}},
    "registry": {
        **MINIMAL,
        "model": {"name": "/models/m", "volume": {"image": {"reference": "registry.example/llama:1"}}},
    },
    "no policies": {**MINIMAL, "networkPolicy": {"enabled": False}},
    "gateway to the Service": {**MINIMAL, "gateway": {"parentRefs": [{"name": "inference"}]}},
    "one pool of flexible workers": {
        **MINIMAL,
        "pools": {"prefill": None, "decode": None, "both": {"role": "worker", "replicas": 4}},
    },
}


@pytest.mark.parametrize("name", MATRIX)
def test_every_manifest_is_valid(name: str, tmp_path: Path) -> None:
    objects = manifests(MATRIX[name], tmp_path)
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(names) == len(set(names))
    for found in objects:
        if (schema := CRDS.get(found["kind"])) is not None:
            jsonschema.validate(found["spec"], schema)
        else:
            for version in VERSIONS:
                validate.validate(found, version, strict=True)
    for spec in pod_specs(objects).values():
        _check_pod(spec)


def _check_pod(spec: dict[str, Any]) -> None:
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*spec["containers"], *(spec.get("initContainers") or [])]:
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for container in spec["containers"]:
        _, role = container["command"]
        flags = [argument.removeprefix("--").partition("=")[0] for argument in container["args"]]
        assert len(flags) == len(set(flags)), "a setting is given once"
        for flag in flags:
            name = flag.replace("-", "_")
            assert {name, name.removeprefix("no_")} & SETTINGS[role].model_fields.keys(), flag


def test_the_init_container_fetches_as_a_worker_would(tmp_path: Path) -> None:
    spec = pod_specs(manifests(EVERYTHING, tmp_path))["demo-decode"]
    [fetch] = spec["initContainers"]
    python, option, program, *arguments = fetch["command"]
    assert (python, option, arguments) == ("python", "-c", ["Qwen/Qwen3-0.6B", "main", "weights"])
    done = subprocess.run(
        [sys.executable, option, program, str(tmp_path), "", "weights"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == (f"{tmp_path}\n", 0), "a folder stays where it is"


def test_it_passes_helms_lint(tmp_path: Path) -> None:
    assert "0 chart(s) failed" in helm("lint", EVERYTHING, tmp_path, "--strict")


def test_a_pods_grace_is_longer_than_its_drain(tmp_path: Path) -> None:
    values = {**MINIMAL, "drainSeconds": 500}
    specs = pod_specs(manifests(values, tmp_path))
    assert specs["demo-decode"]["terminationGracePeriodSeconds"] > 500
    assert "--drain-timeout-s=500" in specs["demo-decode"]["containers"][0]["args"]
    assert specs["demo-coordinator"]["terminationGracePeriodSeconds"] > 60 + 5


def test_a_group_of_one_has_the_pods_of_a_stateful_set(tmp_path: Path) -> None:
    sets, groups = (
        {found["metadata"]["name"]: found for found in manifests(values, tmp_path) if pod_template(found)}
        for values in (EVERYTHING, GROUPS)
    )
    for name in ("demo-prefill", "demo-decode", "demo-flexible"):
        kinds = [found["kind"] for found in (sets[name], groups[name])]
        assert kinds == ["StatefulSet", "LeaderWorkerSet"]
        assert pod_template(sets[name]) == pod_template(groups[name]), "valid for each version of Kubernetes"
        assert sets[name]["spec"].get("replicas") == groups[name]["spec"].get("replicas")
    scaled = {
        kind: found["spec"]["scaleTargetRef"]
        for kind in ("keda", "hpa")
        for found in manifests({**GROUPS, "autoscaling": {"type": kind}}, tmp_path)
        if "scaleTargetRef" in found.get("spec", {}) and found["metadata"]["name"] == "demo-decode"
    }
    target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "demo-decode"}
    assert scaled == {"keda": target, "hpa": target}


def test_policies_open_the_ports_that_are_listened_on(tmp_path: Path) -> None:
    objects = manifests(MINIMAL, tmp_path)
    ports = {
        port["name"]: port["containerPort"]
        for spec in pod_specs(objects).values()
        for port in spec["containers"][0]["ports"]
    }
    policies = {
        found["metadata"]["name"]: found["spec"] for found in objects if "policyTypes" in found["spec"]
    }
    opened = {
        number
        for policy in policies.values()
        for rule in policy["ingress"]
        for port in rule["ports"]
        for first in [ports.get(port["port"], port["port"])]
        for number in range(first, port.get("endPort", first) + 1)
    }
    of_both_roles = {7712, 7713}
    assert opened - of_both_roles == set(ports.values()) - {ports["health"]}, "probes come from the node"


def test_autoscaling_follows_a_figure_that_exists(tmp_path: Path) -> None:
    steering = {"wanted_workers": {"decode": 3}, "load": None, "counts": {}}
    collector = SystemCollector(lambda: SystemSnapshot(steering=steering))
    samples = [sample for family in collector.collect() for sample in family.samples]
    [wanted] = [sample for sample in samples if sample.name == "splitserve_steering_wanted_workers"]
    assert (wanted.labels, wanted.value) == ({"role": "decode"}, 3)
    by_name = {
        (found["kind"], found["metadata"]["name"]): found.get("spec")
        for kind in ("keda", "hpa")
        for found in manifests({**EVERYTHING, "autoscaling": {"type": kind}}, tmp_path)
    }
    [trigger] = by_name["ScaledObject", "demo-decode"]["triggers"]
    assert trigger["metadata"]["query"].startswith(f'max({wanted.name}{{role="decode",')
    [metric] = by_name["HorizontalPodAutoscaler", "demo-decode"]["metrics"]
    assert metric["external"]["metric"]["name"] == wanted.name
    assert "replicas" not in by_name["StatefulSet", "demo-decode"], (
        "an upgrade would undo the autoscaler's work"
    )


def test_alerts_and_dashboard_are_those_of_every_installation(tmp_path: Path) -> None:
    monitoring = CHART.parents[1] / "monitoring"
    found = manifests(EVERYTHING, tmp_path)
    objects = {each["kind"]: each for each in found}
    monitored = objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items()
    [job] = [
        each["metadata"]["name"]
        for each in found
        if each["kind"] == "Service" and monitored <= each["metadata"]["labels"].items()
    ]
    alerts = (monitoring / "alerts.yml").read_text()
    assert 'up{job="splitserve"}' in alerts
    in_the_chart = yaml.safe_load(alerts.replace('job="splitserve"', f'job="{job}"'))
    assert objects["PrometheusRule"]["spec"] == in_the_chart, "Prometheus names targets after their Service"
    dashboard = json.loads(objects["ConfigMap"]["data"]["splitserve.json"])
    assert dashboard == json.loads((monitoring / "grafana.json").read_text())


def test_every_value_is_in_both_files() -> None:
    """The schema knows no value that values.yaml does not list, and the other way round."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(given: dict[str, Any], node: dict[str, Any], path: str) -> None:
        properties = node["properties"].keys() - {"global"}
        assert properties == given.keys(), path
        for name in properties:
            inner = node["properties"][name]
            if "properties" in inner and name not in ("autoscale", "leaderWorkerSet"):
                compare(given[name], inner, f"{path}.{name}")

    compare(values, schema, "values")
    for name, pool in values["pools"].items():
        compare(pool, schema["$defs"]["pool"], f"values.pools.{name}")


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"model": {"name": "/models/m"}}, "tenantsSecret"),
        ({**MINIMAL, "model": {"name": ""}}, "/model/name"),
        ({**MINIMAL, "replicas": 3}, "'replicas' not allowed"),
        ({**MINIMAL, "pools": {"decode": {"autoscale": {"min": 1, "max": 2}}}}, "give steering.slo"),
        (
            {**EVERYTHING, "coordinator": {"openAccess": True}, "steering": {"slo": "ttft=2,tpot=0.05@p90"}},
            "autoscaling follows the pool controller, which must see the whole load",
        ),
        (
            {**MINIMAL, "steering": {"slo": "ttft=2,tpot=0.05@p90", "profile": "p", "mode": "act"}},
            "steering.mode=act: .* give coordinator.replicas=1",
        ),
        (
            {**MINIMAL, "pools": {"decode": {"leaderWorkerSet": {"size": 2}}}},
            "pool decode: leaderWorkerSet.size must be 1: a worker is one pod",
        ),
        (
            {
                **EVERYTHING,
                "pools": {"decode": {"autoscale": {"min": 1, "max": 2}}, "big": {"role": "decode"}},
            },
            "let it be the only decode pool",
        ),
    ],
)
def test_wrong_values_are_refused_with_the_reason(values: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(ChartError, match=error):
        manifests(values, tmp_path)
