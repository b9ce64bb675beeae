"""``splitserve flip``: has a running worker change its role, and waits until it has begun."""

from __future__ import annotations

import time
from typing import Any

import click
import httpx

from .config import CommandError
from .server_access import operator_access, trust
from .settings import FlipSettings

PATIENCE_S = 30.0
POLL_S = 0.05


def flip(settings: FlipSettings, worker: str) -> None:
    """Have the worker change its role. Raises CommandError."""
    url, headers = operator_access(settings.url, settings.admin_key_file, admin_port=True)
    asked = {
        "to": settings.to,
        **({} if settings.timeout_s is None else {"timeout_s": str(settings.timeout_s)}),
    }
    verify = trust(url, settings.tls_ca)
    with httpx.Client(base_url=url, headers=headers, timeout=10, trust_env=False, verify=verify) as client:
        try:
            answer = client.post(f"/admin/flip/{worker}", params=asked)
            if answer.status_code != 202:
                raise CommandError(_message(answer))
            process = answer.json()["process"]
            record = _when_begun(client, process)
        except httpx.HTTPError as error:
            raise CommandError(f"no answer at {url}: {error}; is it the coordinator's address?") from error
    if record is None:
        raise CommandError(
            f"{process} has not begun as a {settings.to} worker within {PATIENCE_S:g} s; see its log"
        )
    click.echo(
        f"{process} is a {settings.to} worker, after {1e3 * record['began_s']:.0f} ms; what it ran "
        "before finishes or moves"
    )


def _when_begun(client: httpx.Client, process: str) -> dict[str, Any] | None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        flips: list[dict[str, Any]] = client.get("/admin/flips").raise_for_status().json()["flips"]
        newest: dict[str, Any] | None = next(
            (record for record in reversed(flips) if record["process"] == process), None
        )
        if newest is not None and newest["began_s"] is not None:
            return newest
        time.sleep(POLL_S)
    return None


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} from {answer.url}"
