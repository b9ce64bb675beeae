"""What ``splitserve up`` asks its coordinator: whether it serves, and by which workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx

from .config import ConfigError
from .server_access import trust
from .up import Plan


def _asking(url: str, certificate: Path | None) -> httpx.AsyncClient:
    """For one question, asked ten times a second."""
    return httpx.AsyncClient(timeout=5, trust_env=False, verify=trust(url, None, certificate))


async def is_ready(
    url: str, certificate: Path | None = None, models: Sequence[str] = (), processes: int = 1
) -> bool:
    """Has a request gone through prefill, handoff and decode? One of each of ``models``, by each of the
    coordinator's ``processes``: chance chooses among them, so they are asked several times."""
    pages = [f"{url}/ready?{urlencode({'model': model})}" for model in models] or [f"{url}/ready"]
    try:
        for page in pages * (8 * processes if processes > 1 else 1):
            async with _asking(url, certificate) as client:
                if (await client.get(page)).status_code != 200:
                    return False
    except httpx.HTTPError:
        return False
    return True


async def known_workers(plan: Plan) -> dict[str, int] | None:
    """Process ids of the workers that the coordinator counts as alive; None where it does not answer."""
    if (state := await _debug_state(plan, plan.url)) is None:
        return None
    return {worker["process"] or worker["worker_id"]: worker["pid"] for worker in _workers(state)}


def _workers(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return those of all models."""
    models = [state, *state.get("models", {}).values()]
    return [worker for model in models for worker in model["workers"]]


async def incarnations(plan: Plan, url: str) -> dict[str, int]:
    """Return the incarnation of each process that does not drain; empty: the coordinator does not answer."""
    if (state := await _debug_state(plan, url)) is None:
        return {}
    workers = [worker for worker in _workers(state) if not worker["draining"]]
    found = {worker["process"] or worker["worker_id"]: worker["incarnation"] for worker in workers}
    return {**found, "coordinator": state["coordinator"]["incarnation"]}


async def _debug_state(plan: Plan, url: str) -> dict[str, Any] | None:
    """None: the coordinator does not answer, or refuses, or a file is just being replaced."""
    try:
        headers = {"authorization": f"Bearer {plan.admin_key}"}
        async with _asking(url, plan.coordinator.tls_cert) as client:
            response = await client.get(f"{url}/debug/state", headers=headers)
            return response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, ConfigError, OSError, ValueError):
        return None
