"""Pods of workers on several GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.kubernetes import HELM, MINIMAL, manifests, pod_specs

pytestmark = pytest.mark.skipif(not HELM, reason="helm is not installed")
OWN = {
    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
}


def test_a_worker_is_split_among_its_gpus_and_has_shared_memory_for_nccl(tmp_path: Path) -> None:
    """Once, where the values mount it themselves, too."""
    values = {**MINIMAL, "pools": {"prefill": {"gpus": 2}, "decode": {"gpus": 4, **OWN}}}
    specs = pod_specs(manifests(values, tmp_path))
    for name, gpus in (("demo-prefill", 2), ("demo-decode", 4)):
        (container,) = specs[name]["containers"]
        assert f"--tensor-parallel-size={gpus}" in container["args"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        mounts = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        assert mounts == ["shm"]
        assert [each["name"] for each in specs[name]["volumes"]].count("shm") == 1
