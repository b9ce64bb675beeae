"""The operator: ``python -m splitserve.deploy.operator.main``, in a pod, for the namespace of that pod.

kopf watches SplitserveClusters and their StatefulSets; each event starts a pass of that cluster, and so does
every fifth second, because coordinators send no events. No finalizer and no annotation is left on a resource.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from typing import Any

import httpx
import kopf

from .kubernetes import ApiError, Kubernetes
from .manifests import GROUP, MANAGER, PLURAL, VERSION
from .reconcile import Reconciler

EVERY_S = 5.0
FIRST_RETRY_S, MAX_RETRY_S = 0.5, 60.0
_log = logging.getLogger(__name__)


class Operator:
    """One task a cluster, from the event that shows it to the pass that finds it gone."""

    def __init__(self, reconciler: Reconciler, every_s: float = EVERY_S) -> None:
        self._reconciler, self._every_s = reconciler, every_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed: dict[str, asyncio.Event] = {}

    def registry(self) -> kopf.OperatorRegistry:
        """Return the handlers for kopf."""
        registry = kopf.OperatorRegistry()
        labels = {"app.kubernetes.io/managed-by": MANAGER}
        kopf.on.startup(registry=registry)(self._configure)
        kopf.on.cleanup(registry=registry)(self._stop)
        kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(self._of_cluster)
        kopf.on.event("apps", "v1", "statefulsets", labels=labels, registry=registry)(self._of_stateful_set)
        return registry

    async def _configure(self, settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.scanning.disabled = True  # of other namespaces and kinds: it has no right to see them

    async def _stop(self, **_: Any) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._reconciler.close()

    async def _of_cluster(self, name: str, **_: Any) -> None:
        self._wake(name)

    async def _of_stateful_set(self, labels: kopf.Labels, **_: Any) -> None:
        self._wake(labels["app.kubernetes.io/instance"])

    def _wake(self, name: str) -> None:
        self._changed.setdefault(name, asyncio.Event()).set()
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(self._follow(name))

    async def _follow(self, name: str) -> None:
        """Make passes until the cluster is gone. An error is logged, and tried again after twice as long."""
        changed, retry_s = self._changed[name], 0.0
        while True:
            changed.clear()
            try:
                if not await self._reconciler.run(name) and not changed.is_set():
                    break
                retry_s = 0.0
            except (ApiError, httpx.HTTPError) as error:
                _log.warning("%s: tried again: %s", name, error)
                retry_s = min(MAX_RETRY_S, max(FIRST_RETRY_S, 2 * retry_s))
            except Exception:
                _log.exception("%s: an error of the operator's own; tried again", name)
                retry_s = MAX_RETRY_S
            if retry_s:
                await asyncio.sleep(retry_s)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._every_s):  # Python 3.11's wait_for() may swallow _stop()
                        await changed.wait()
        del self._tasks[name], self._changed[name]


def connection() -> kopf.ConnectionInfo:
    """Return how the API server is reached: by the pod's service account, else by the kubeconfig."""
    settings = kopf.OperatorSettings()
    found = kopf.login_with_service_account(settings=settings) or kopf.login_with_kubeconfig(
        settings=settings
    )
    if found is None:
        raise kopf.LoginError("no service account and no kubeconfig: run this in a pod, or set KUBECONFIG")
    return found


def main() -> None:
    kopf.configure()
    namespace = connection().default_namespace or "default"
    kubernetes = Kubernetes(connection, namespace)
    operator = Operator(Reconciler(kubernetes, lambda name: f"http://{name}.{namespace}.svc:8000"))
    kopf.run(
        registry=operator.registry(),
        namespaces=[namespace],
        standalone=True,
        liveness_endpoint=f"http://0.0.0.0:{os.environ.get('HEALTH_PORT', '8080')}/healthz",
    )


if __name__ == "__main__":
    main()
