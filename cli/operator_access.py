"""How a command reaches a coordinator's operators' pages: on this host it finds address and admin key by
itself."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import httpx

from ..coordinator.run_folder import find_door, operator_headers
from .checks import read_key


def operator_access(
    url: str, key_file: Path | None, *, admin_port: bool = False
) -> tuple[str, dict[str, str]]:
    """The URL to ask and the headers to send. ``admin_port``: what is asked lies under /admin. Raises
    ConfigError."""
    door = find_door(url)
    if door is not None:
        url = door.admin_url if admin_port else door.url
    if key_file is not None:
        return url, {"authorization": f"Bearer {read_key('--admin-key-file', key_file)}"}
    return url, door.headers() if door is not None else {}


class OperatorAuth(httpx.Auth):
    """Shows coordinators of this host their admin key, once one of them has asked for it."""

    def __init__(self) -> None:
        self._headers: dict[str, str] = {}

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """See httpx.Auth. A request with a key of its own stays as it is."""
        if "authorization" in request.headers:
            yield request
            return
        request.headers.update(self._headers)
        response = yield request
        if response.status_code == 401:
            self._headers = operator_headers(str(request.url))
            request.headers.update(self._headers)
            yield request
