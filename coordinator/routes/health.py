"""/health: the list of faults. It answers 200 while the process serves, because Kubernetes would kill it
otherwise, and a restart mends none of this. /ready is for load balancers."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..lifecycle.request import Dispatcher
from ..listeners import ListenerFailures

RECENT_S = 60.0
"""A listener that has failed counts as failing for this time."""
MIN_FREE_BYTES = 256 << 20
DISK_PATIENCE_S = 0.5
"""A network file system may hang: then it is reported as not answering."""
NO_PROOF = "no request has passed prefill, handoff and decode yet"


class Health:
    """``dispatchers``: by model. ``folders``: where files are written, by option. Reasons name options,
    models and workers' roles, never a path or a request: anyone may read them."""

    def __init__(
        self,
        dispatchers: Mapping[str, Dispatcher],
        failures: ListenerFailures,
        folders: Mapping[str, Path] | None = None,
    ) -> None:
        self.folders = folders or {}
        self.stopping = False
        self._dispatchers, self._failures = dispatchers, failures
        self._counts: Counter[str] = Counter()
        self._failed_at: dict[str, float] = {}  # monotonic seconds, by listener
        self._disks: asyncio.Future[dict[str, int]] | None = None

    def sample(self, now: float, system: object = None) -> None:
        """Looks which listeners have failed since the last look. (A listener of the sampler, which passes the
        system too.)"""
        for name, count in self._failures.counts.items():
            if count > self._counts[name]:
                self._failed_at[name] = now
        self._counts = Counter(self._failures.counts)

    async def report(self, now: float) -> dict[str, Any]:
        """JSON-ready: ``status`` is ok or degraded; ``checks`` have a ``status`` each, and a ``reason`` where
        it is not ok."""
        self.sample(now)
        reasons = {
            "serving": self._stopping() or "; ".join(self._unready().values()),
            "listeners": self._listeners(now),
            "disk": await self._disk(),
        }
        checks = {
            name: {"status": "degraded", "reason": reason} if reason else {"status": "ok"}
            for name, reason in reasons.items()
        }
        return {"status": "degraded" if any(reasons.values()) else "ok", "checks": checks}

    def why_not_ready(self, model: str = "") -> str:
        """ "" where requests can be served: for ``model``, or else for any."""
        unready = self._unready()
        if model:
            return self._stopping() or unready.get(model, "")
        any_is_ready = len(unready) < len(self._dispatchers)
        return self._stopping() or ("" if any_is_ready else "; ".join(unready.values()))

    def _stopping(self) -> str:
        return "the server is shutting down" if self.stopping else ""

    def _unready(self) -> dict[str, str]:
        """By model."""
        return {
            name: f"{name}: {why}" if len(self._dispatchers) > 1 else why
            for name, dispatcher in self._dispatchers.items()
            if not dispatcher.ready()
            for why in [dispatcher.gap() or dispatcher.failing() or NO_PROOF]
        }

    def _listeners(self, now: float) -> str:
        failing = sorted(name for name, at in self._failed_at.items() if now - at < RECENT_S)
        return f"failing, while requests go on: {', '.join(failing)}; the log says why" if failing else ""

    async def _disk(self) -> str:
        if not self.folders:
            return ""
        if self._disks is None:
            self._disks = asyncio.ensure_future(asyncio.to_thread(_free_bytes, dict(self.folders)))
        asked = self._disks  # by several requests at a time, perhaps
        done, _ = await asyncio.wait([asked], timeout=DISK_PATIENCE_S)
        if not done:
            return f"the file system of {', '.join(self.folders)} does not answer"
        free = asked.result()
        if self._disks is asked:
            self._disks = None
        full = [
            f"{option} has {bytes_ >> 20} MiB free"
            for option, bytes_ in free.items()
            if bytes_ < MIN_FREE_BYTES
        ]
        return f"the disk is nearly full: {', '.join(full)}" if full else ""


def _free_bytes(folders: Mapping[str, Path]) -> dict[str, int]:
    """By option; a folder that is not there yet counts as its parent."""
    found = {}
    for option, folder in folders.items():
        there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
        found[option] = shutil.disk_usage(there).free
    return found
