"""An API server with state: what the operator and kopf use of Kubernetes' REST API, over HTTP.

Objects have uid, generation and resourceVersion. Writes are create by server-side apply, merge patches that a
stale resourceVersion makes fail with 409, patches of /status, and deletion with the objects that name the
deleted one as their owner. Watches stream every change. Each object that is written must be valid.

There are no controllers: tests call ``set_pods`` and thereby play that of StatefulSets.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from copy import deepcopy
from typing import Any

from aiohttp import web

from .kubernetes_schemas import CRD, INVALID, check_valid

KINDS = {
    ("apps/v1", "statefulsets"): "StatefulSet",
    ("apps/v1", "deployments"): "Deployment",
    ("v1", "services"): "Service",
    ("v1", "configmaps"): "ConfigMap",
    ("v1", "secrets"): "Secret",
    ("policy/v1", "poddisruptionbudgets"): "PodDisruptionBudget",
    ("networking.k8s.io/v1", "networkpolicies"): "NetworkPolicy",
    ("monitoring.coreos.com/v1", "servicemonitors"): "ServiceMonitor",
    ("monitoring.coreos.com/v1", "prometheusrules"): "PrometheusRule",
    (f"{CRD['group']}/{CRD['versions'][0]['name']}", CRD["names"]["plural"]): CRD["names"]["kind"],
}
DISCOVERED = {  # kinds that kopf looks for
    **KINDS,
    ("v1", "namespaces"): "Namespace",
    ("apiextensions.k8s.io/v1", "customresourcedefinitions"): "CustomResourceDefinition",
}
NAMESPACE = "llm"
Object = dict[str, Any]
Key = tuple[str, str]  # plural, name


class Refusal(Exception):
    """An answer of another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def merge(base: Object, patch: Object) -> Object:
    """Return a JSON merge patch's result."""
    found = dict(base)
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        elif isinstance(value, dict):
            before = found.get(name)
            found[name] = merge(before if isinstance(before, dict) else {}, value)
        else:
            found[name] = value
    return found


def without(base: Object, before: Object, after: Object) -> Object:
    """Return ``base`` without the fields that the manager's earlier apply had and its new one lacks."""
    found = dict(base)
    for name, value in before.items():
        if name not in after:
            found.pop(name, None)
        elif isinstance(value, dict) and isinstance(after[name], dict) and isinstance(found.get(name), dict):
            found[name] = without(found[name], value, after[name])
    return found


class FakeKubernetes:
    """``objects`` by plural and name, of one namespace. ``writes`` counts them by method and plural."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.history: list[tuple[str, Object]] = []  # type of the event, object
        self.writes: Counter[tuple[str, str]] = Counter()
        self.faults: list[tuple[str, int]] = []
        """The next requests whose method and path match the pattern get this status, once for each entry."""
        self.url = ""
        self._applied: dict[tuple[Key, str], Object] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Condition()

    async def start(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._answer])
        prefix = "/{root:apis?}/{version:v1|[^/]+/[^/]+}"
        objects = prefix + "/namespaces/{namespace}/{plural}"
        app.router.add_get("/{path:|version|api|apis}", self._discover)
        app.router.add_get(prefix, self._resources)
        app.router.add_get(objects, self._list)
        app.router.add_get(objects + "/{name}", self._get)
        app.router.add_patch(objects + "/{name}", self._patch)
        app.router.add_patch(objects + "/{name}/{sub:status}", self._patch)
        app.router.add_delete(objects + "/{name}", self._delete)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = site.name
        return runner

    # --- what tests do ---------------------------------------------------------------------------------

    async def put(self, plural: str, found: Object) -> Object:
        """Create an object, or merge it into the one of its name."""
        key = (plural, found["metadata"]["name"])
        return await self._write(key, merge(self.objects.get(key, {}), found))

    async def set_pods(self, name: str, pods: int, ready: int) -> None:
        """Set a StatefulSet's status, as its controller does."""
        found = self.objects["statefulsets", name]
        status = {
            "replicas": pods,
            "readyReplicas": ready,
            "observedGeneration": found["metadata"]["generation"],
        }
        await self._write(("statefulsets", name), {**found, "status": status})

    async def remove(self, plural: str, name: str) -> None:
        """Delete an object, and what it owns."""
        found = self.objects.pop((plural, name))
        await self._publish("DELETED", found)
        for key, other in list(self.objects.items()):
            owners = {owner["uid"] for owner in other["metadata"].get("ownerReferences", ())}
            if found["metadata"]["uid"] in owners and key in self.objects:
                await self.remove(*key)

    def of_kind(self, plural: str) -> dict[str, Object]:
        """Return the objects of a kind, by name."""
        return {name: found for (kind, name), found in self.objects.items() if kind == plural}

    # --- what clients do -------------------------------------------------------------------------------

    @web.middleware
    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            what = f"{request.method} {request.path}"
            for fault in self.faults:
                if re.search(fault[0], what):
                    self.faults.remove(fault)
                    raise Refusal(fault[1], "as the test wants it")
            answer: web.StreamResponse = await handler(request)
            return answer
        except (Refusal, web.HTTPNotFound) as error:
            body = {"kind": "Status", "status": "Failure", "code": error.status, "message": str(error)}
            return web.json_response({**body, "apiVersion": "v1", "metadata": {}}, status=error.status)

    async def _discover(self, request: web.Request) -> web.Response:
        groups = [
            {
                "name": group.partition("/")[0],
                "versions": [{"groupVersion": group, "version": group.partition("/")[2]}],
                "preferredVersion": {"groupVersion": group, "version": group.partition("/")[2]},
            }
            for group in sorted({version for version, _ in DISCOVERED if "/" in version})
        ]
        answers: dict[str, Object] = {"api": {"versions": ["v1"]}, "apis": {"groups": groups}}
        return web.json_response(answers.get(request.match_info["path"], {"paths": []}))

    async def _resources(self, request: web.Request) -> web.Response:
        verbs = ["get", "list", "watch", "patch", "delete"]
        resources = [
            {"name": plural, "kind": kind, "singularName": "", "namespaced": True, "verbs": verbs}
            for (version, plural), kind in DISCOVERED.items()
            if version == request.match_info["version"]
        ]
        return web.json_response({"kind": "APIResourceList", "resources": resources})

    def _key(self, request: web.Request) -> Key:
        match = request.match_info
        if (match["version"], match["plural"]) not in KINDS or match["namespace"] != NAMESPACE:
            raise Refusal(404, f"the server has no {request.path}")
        return match["plural"], match.get("name", "")

    def _found(self, key: Key) -> Object:
        if key not in self.objects:
            raise Refusal(404, f"{' '.join(key)!r} not found")
        return self.objects[key]

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._found(self._key(request)))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        plural, _ = self._key(request)
        labels = dict(
            pair.split("=") for pair in filter(None, request.query.get("labelSelector", "").split(","))
        )

        def is_selected(found: Object) -> bool:
            return labels.items() <= found["metadata"].get("labels", {}).items()

        if "watch" in request.query:
            return await self._watch(request, plural, is_selected)
        items = [found for found in self.of_kind(plural).values() if is_selected(found)]
        return web.json_response({"metadata": {"resourceVersion": str(len(self.history))}, "items": items})

    async def _watch(self, request: web.Request, plural: str, is_selected: Any) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        position = int(request.query.get("resourceVersion") or 0)
        while True:
            async with self._changed:
                while len(self.history) == position:
                    await self._changed.wait()
            for kind, found in self.history[position:]:
                if _plural(found) == plural and is_selected(found):
                    line = json.dumps({"type": kind, "object": found})
                    try:
                        await response.write(line.encode() + b"\n")
                    except ConnectionResetError:
                        return response
            position = len(self.history)

    async def _patch(self, request: web.Request) -> web.Response:
        key, body = self._key(request), json.loads(await request.read())
        self.writes[request.method, key[0]] += 1
        manager = (key, request.query.get("fieldManager", ""))
        if request.content_type == "application/apply-patch+yaml":
            base = without(self.objects.get(key, {}), self._applied.get(manager, {}), body)
            self._applied[manager] = body
        else:
            base = self._found(key)
        asked = body.get("metadata", {}).pop("resourceVersion", None)
        if asked not in (None, base.get("metadata", {}).get("resourceVersion")):
            raise Refusal(
                409, "the object has been modified; please apply your changes to the latest version"
            )
        if "sub" in request.match_info:
            body = {"status": body["status"]}
        return web.json_response(await self._write(key, merge(base, body)))

    async def _delete(self, request: web.Request) -> web.Response:
        key = self._key(request)
        self.writes[request.method, key[0]] += 1
        self._found(key)
        await self.remove(*key)
        return web.json_response({"kind": "Status", "status": "Success"})

    # --- state -----------------------------------------------------------------------------------------

    async def _write(self, key: Key, found: Object) -> Object:
        before, found = self.objects.get(key), deepcopy(found)
        if before is not None and _is_same(before, found):
            return before
        try:
            check_valid(_timeless(found), "1.37")
        except INVALID as error:
            raise Refusal(422, f"{key}: {error}") from error
        metadata = found["metadata"]
        metadata.setdefault("uid", f"uid-{next(self._numbers)}")
        metadata.setdefault("namespace", NAMESPACE)
        metadata["resourceVersion"] = str(next(self._numbers))
        if before is None or before.get("spec") != found.get("spec"):
            metadata["generation"] = metadata.get("generation", 0) + 1
        self.objects[key] = found
        await self._publish("ADDED" if before is None else "MODIFIED", found)
        return found

    async def _publish(self, kind: str, found: Object) -> None:
        self.history.append((kind, deepcopy(found)))
        async with self._changed:
            self._changed.notify_all()


def _plural(found: Object) -> str:
    [plural] = [plural for (_, plural), kind in KINDS.items() if kind == found["kind"]]
    return plural


def _timeless(found: Object) -> Object:
    """Return an object without what only the server writes."""
    server_side = ("resourceVersion", "generation", "uid")
    return {**found, "metadata": {k: v for k, v in found["metadata"].items() if k not in server_side}}


def _is_same(before: Object, after: Object) -> bool:
    return _timeless(before) == _timeless(after)
