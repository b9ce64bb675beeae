"""How a script reaches the operators' pages of a coordinator on this host."""

from __future__ import annotations

from collections.abc import Generator

import httpx

from ..coordinator.run_folder import operator_headers


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
