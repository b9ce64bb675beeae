"""The coordinators' admin API, as far as the operator needs it."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from .rollout import Worker


@dataclass(frozen=True, slots=True)
class State:
    """``wanted``: workers by role, by the pool controller; empty: it is off, or knows nothing yet."""

    workers: list[Worker]
    wanted: dict[str, int]


class Coordinator:
    """Whatever coordinator answers at ``url``. Raises httpx.HTTPError where none does, or it refuses."""

    def __init__(self, http: httpx.AsyncClient, url: str, key: str) -> None:
        self._http, self._url, self._headers = http, url, {"authorization": f"Bearer {key}"}

    async def state(self) -> State:
        """Return the workers that are connected, and what the pool controller wants."""
        found = (await self._call("GET", "/debug/state")).json()
        workers = [
            Worker(w["process"] or "", w["role"], w["draining"], len(w["dispatches"]))
            for w in found["workers"]
        ]
        return State(workers, (found.get("steering") or {}).get("wanted_workers") or {})

    async def flip(self, process: str, role: str) -> None:
        """Have a worker change its role."""
        await self._call("POST", f"/admin/flip/{process}", {"to": role})

    async def _call(self, method: str, path: str, params: dict[str, str] | None = None) -> httpx.Response:
        answer = await self._http.request(method, self._url + path, params=params, headers=self._headers)
        return answer.raise_for_status()
