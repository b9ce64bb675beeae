"""Renders the Kubernetes chart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "deploy/kubernetes/chart"
HELM = shutil.which("helm") or shutil.which("helm", path=Path(sys.executable).parent) or ""
MINIMAL: dict[str, Any] = {"model": {"name": "/models/m"}, "coordinator": {"openAccess": True}}


class ChartError(Exception):
    """What Helm has against the values."""


def helm(command: str, values: dict[str, Any], folder: Path, *more: str) -> str:
    """Run ``helm COMMAND`` on the chart with these values; return its output. Raises ChartError."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    arguments = [HELM, *command.split(), str(CHART), "--values", str(file), "--namespace", "llm", *more]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ChartError(done.stderr)
    return done.stdout


def manifests(values: dict[str, Any], folder: Path, release: str = "demo") -> list[dict[str, Any]]:
    """Return all objects of the chart. Raises ChartError."""
    rendered = helm(f"template {release}", values, folder)
    return [document for document in yaml.safe_load_all(rendered) if document]


def pod_specs(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the pod templates' specs by the name of the object that makes the pods."""
    return {found["metadata"]["name"]: made["spec"] for found in objects if (made := pod_template(found))}


def pod_template(found: dict[str, Any]) -> dict[str, Any]:
    """Return the template of an object's pods; empty: it makes none."""
    spec = found.get("spec", {})
    template: dict[str, Any] = spec.get("leaderWorkerTemplate", {}).get("workerTemplate") or spec.get(
        "template"
    )
    return template if found["kind"] in ("Deployment", "StatefulSet", "LeaderWorkerSet") else {}
