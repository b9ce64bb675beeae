"""Checks objects against the schemas of Kubernetes, of other projects, and of the operator."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
OTHERS = yaml.safe_load((Path(__file__).parents[1] / "deploy/crds.yaml").read_text())
INSTALL = list(yaml.safe_load_all((KUBERNETES / "operator.yaml").read_text()))
CRD = INSTALL[0]["spec"]
INVALID = (jsonschema.ValidationError, kubernetes_validate.ValidationError)
Object = dict[str, Any]


def plain(schema: Object) -> Object:
    """Return a CRD's schema as JSON Schema that also refuses unknown fields, as ``kubectl apply`` does."""
    found: Object = {
        name: plain(part) if isinstance(part, dict) else part
        for name, part in schema.items()
        if not name.startswith("x-kubernetes") and name not in ("nullable", "default")
    }
    if "properties" in found:
        found["properties"] = {name: plain(part) for name, part in schema["properties"].items()}
        found.setdefault("additionalProperties", "x-kubernetes-preserve-unknown-fields" in schema)
    if schema.get("nullable"):
        found = {"anyOf": [found, {"type": "null"}]}
    return found


def check_valid(found: Object, version: str) -> None:
    """Raises an error of ``jsonschema`` or ``kubernetes_validate``."""
    if found["kind"] == CRD["names"]["kind"]:
        schema = plain(CRD["versions"][0]["schema"]["openAPIV3Schema"])["properties"]
        jsonschema.validate(found["spec"], schema["spec"])
        jsonschema.validate(found.get("status", {}), schema["status"])
    elif found["kind"] in OTHERS:
        jsonschema.validate(found["spec"], OTHERS[found["kind"]])
    else:
        _check_kind(json.dumps({**found, "status": None}), version)


@lru_cache(maxsize=4096)  # a check takes 0.1 s
def _check_kind(text: str, version: str) -> None:
    found = json.loads(text)
    del found["status"]
    kubernetes_validate.validate(found, version, strict=True)
