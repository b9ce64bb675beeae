"""How a script reaches the operators' pages of a coordinator on this host."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from ..coordinator.run_folder import find_door


def operator_headers(url: str) -> dict[str, str]:
    """For a request to a coordinator on this host; empty where ``find_door`` finds none."""
    door = find_door(url)
    return {} if door is None else door.headers()


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
