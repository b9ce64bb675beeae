"""The Kubernetes API, as far as the operator needs it.

A refusal raises ApiError; no answer raises httpx.HTTPError.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import httpx
import kopf

from .manifests import GROUP, MANAGER, PLURAL, VERSION, Object

TIMEOUT_S = 10.0
RESOURCES = {  # of all kinds that the chart renders
    "Deployment": ("apps/v1", "deployments"),
    "StatefulSet": ("apps/v1", "statefulsets"),
    "Service": ("v1", "services"),
    "ConfigMap": ("v1", "configmaps"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "ServiceMonitor": ("monitoring.coreos.com/v1", "servicemonitors"),
    "PrometheusRule": ("monitoring.coreos.com/v1", "prometheusrules"),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", "httproutes"),
    "InferencePool": ("inference.networking.k8s.io/v1", "inferencepools"),
}


class ApiError(Exception):
    """The API server's refusal, in its words. ``status``: of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Kubernetes:
    """The objects of one namespace. ``connect`` is asked anew for each call, because tokens expire."""

    def __init__(self, connect: Callable[[], kopf.ConnectionInfo], namespace: str) -> None:
        self._connect, self._namespace = connect, namespace
        self._info = connect()
        self._client = _client(self._info)

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def cluster(self, name: str) -> Object | None:
        """Return a SplitserveCluster; None: there is none, or it is being deleted."""
        found = await self._find(self._path(f"{GROUP}/{VERSION}", PLURAL, name))
        return None if found is None or "deletionTimestamp" in found["metadata"] else found

    async def set_status(self, cluster: Object, status: Object) -> None:
        """Replace fields of a SplitserveCluster's status, unless it was changed since it was read."""
        metadata = cluster["metadata"]
        path = self._path(f"{GROUP}/{VERSION}", PLURAL, metadata["name"])
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": status}
        await self._call("PATCH", f"{path}/status", body, "application/merge-patch+json")

    async def data(self, plural: Literal["configmaps", "secrets"], name: str) -> dict[str, str]:
        """Return a ConfigMap's data, or a Secret's, which is in base64."""
        found = await self._call("GET", self._path("v1", plural, name))
        return dict(found.get("data") or {})

    async def list(self, kind: str, labels: str) -> list[Object]:
        """Return the objects of a kind with these labels; none where the kind is not installed."""
        found = await self._find(self._path(*RESOURCES[kind]), params={"labelSelector": labels})
        return found["items"] if found else []

    async def apply(self, found: Object) -> None:
        """Apply an object: the server merges it with the fields of others."""
        path = self._path(*RESOURCES[found["kind"]], found["metadata"]["name"])
        params = {"fieldManager": MANAGER, "force": "true"}
        await self._call("PATCH", path, found, "application/apply-patch+yaml", params)

    async def patch(self, found: Object, changes: Object) -> None:
        """Change fields of an object, unless it was changed since it was read."""
        path = self._path(*RESOURCES[found["kind"]], found["metadata"]["name"])
        version = {"resourceVersion": found["metadata"]["resourceVersion"]}
        body = changes | {"metadata": changes.get("metadata", {}) | version}
        params = {"fieldManager": MANAGER}
        await self._call("PATCH", path, body, "application/merge-patch+json", params)

    async def delete(self, kind: str, name: str) -> None:
        """Delete an object and what it owns, if it is there."""
        try:
            await self._call(
                "DELETE", self._path(*RESOURCES[kind], name), {"propagationPolicy": "Background"}
            )
        except ApiError as error:
            if error.status != 404:
                raise

    def _path(self, version: str, plural: str, name: str = "") -> str:
        root = "apis" if "/" in version else "api"
        return f"/{root}/{version}/namespaces/{self._namespace}/{plural}" + (f"/{name}" if name else "")

    async def _find(self, path: str, params: dict[str, str] | None = None) -> Object | None:
        try:
            return await self._call("GET", path, params=params)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def _call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        content_type: str = "application/json",
        params: dict[str, str] | None = None,
    ) -> Object:
        info = self._connect()
        if info != self._info:
            await self._client.aclose()
            self._info, self._client = info, _client(info)
        headers = {"content-type": content_type}
        content = None if body is None else json.dumps(body)
        answer = await self._client.request(method, path, content=content, params=params, headers=headers)
        if not answer.is_success:
            raise ApiError(answer.status_code, _message(answer))
        found: Object = answer.json()
        return found


def _client(info: kopf.ConnectionInfo) -> httpx.AsyncClient:
    verify = info.as_ssl_context() if info.server.startswith("https") else False
    headers = info.as_http_headers()
    return httpx.AsyncClient(
        base_url=info.server, headers=headers, verify=verify, timeout=TIMEOUT_S, trust_env=False
    )


def _message(answer: httpx.Response) -> str:
    try:
        message: Any = answer.json()["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    return f"{answer.request.method} {answer.request.url.path}: {message}"
