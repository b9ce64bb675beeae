"""The admin API's part about tenants: the same as ``splitserve keys``, by HTTP.

GET  /admin/tiers      PUT  /admin/tiers/{name}       {"priority_class", limits}; a limit of 0 takes it away
GET  /admin/tenants    PUT  /admin/tenants/{name}     {"tier", "shared_cache"}; GET: and stored bytes
GET  /admin/keys       POST /admin/keys               {"tenant", "name", "expires_in_s", limits} -> the key
POST /admin/keys/{key}/rotate  {"grace_s"}            DELETE /admin/keys/{key}
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import NotFound, StorageFull
from ..full_disk import is_full
from ..http.answers import json_response
from ..http.body import read_body
from ..lifecycle.request import PriorityClass
from ..stored_bytes import stored_in
from ..tenants.errors import Unknown
from ..tenants.limits import Name, NewLimits, NewTierLimits
from ..tenants.store import TenantStore
from ..validation import validated

MAX_BODY_BYTES = 1 << 16
NO_STORES: Mapping[str, Path] = {}
Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")


class TierBody(NewTierLimits):
    priority_class: PriorityClass | None = None


class TenantBody(BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)

    tier: Name | None = None
    shared_cache: Annotated[str, Field(max_length=256)] | None = None


class KeyBody(NewLimits):
    tenant: Name
    name: Annotated[str, Field(max_length=256)] = ""
    expires_in_s: Annotated[float, Field(gt=0, le=1e10)] | None = None


class RotateBody(BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)

    grace_s: Annotated[float, Field(ge=0, le=1e8)] = 0.0


def tenant_routes(path: Path | None, stores: Mapping[str, Path] = NO_STORES) -> list[Route]:
    """Empty where no tenants file is configured. ``stores``: files that count what a tenant has stored, by
    what they hold."""
    return TenantRoutes(path, stores).routes() if path is not None else []


class TenantRoutes:
    """Each call opens the tenants file anew, on a thread: these are rare."""

    def __init__(self, path: Path, stores: Mapping[str, Path]) -> None:
        self._path, self._stores = path, stores

    def routes(self) -> list[Route]:
        return [
            Route("/admin/tiers", self._tiers),
            Route("/admin/tiers/{name}", self._set_tier, methods=["PUT"]),
            Route("/admin/tenants", self._tenants),
            Route("/admin/tenants/{name}", self._set_tenant, methods=["PUT"]),
            Route("/admin/keys", self._keys, methods=["GET"]),
            Route("/admin/keys", self._create_key, methods=["POST"]),
            Route("/admin/keys/{key}/rotate", self._rotate_key, methods=["POST"]),
            Route("/admin/keys/{key}", self._revoke_key, methods=["DELETE"]),
        ]

    async def _tiers(self, request: Request) -> Response:
        return await self._do(lambda store: {"tiers": store.tiers()})

    async def _set_tier(self, request: Request) -> Response:
        body, name = await self._body(request, TierBody), request.path_params["name"]
        return await self._do(lambda store: store.set_tier(name, body.priority_class, body.limits()))

    async def _tenants(self, request: Request) -> Response:
        def tenants(store: TenantStore) -> dict[str, Any]:
            stored = {f"stored_bytes_of_{what}": stored_in(path) for what, path in self._stores.items()}
            return {
                "tenants": [
                    {**tenant, **{what: found.get(tenant["name"], 0) for what, found in stored.items()}}
                    for tenant in store.tenants()
                ]
            }

        return await self._do(tenants)

    async def _set_tenant(self, request: Request) -> Response:
        body, name = await self._body(request, TenantBody), request.path_params["name"]
        return await self._do(
            lambda store: store.set_tenant(name, tier=body.tier, shared_cache=body.shared_cache)
        )

    async def _keys(self, request: Request) -> Response:
        return await self._do(lambda store: {"keys": store.keys()})

    async def _create_key(self, request: Request) -> Response:
        body = await self._body(request, KeyBody)
        expires = time.time() + body.expires_in_s if body.expires_in_s is not None else None
        return await self._do(lambda store: store.create_key(body.tenant, body.name, body.limits(), expires))

    async def _rotate_key(self, request: Request) -> Response:
        body, key = await self._body(request, RotateBody), request.path_params["key"]
        return await self._do(lambda store: store.rotate_key(key, body.grace_s))

    async def _revoke_key(self, request: Request) -> Response:
        key = request.path_params["key"]
        return await self._do(lambda store: store.revoke_key(key))

    async def _do(self, act: Callable[[TenantStore], Any]) -> Response:
        def on_thread() -> Any:
            store = TenantStore(self._path)
            try:
                return act(store)
            except sqlite3.Error as error:
                if store.frozen or is_full(error):
                    raise StorageFull(f"the tenants file {self._path}") from error
                raise
            finally:
                store.close()

        try:
            result = await anyio.to_thread.run_sync(on_thread)
        except Unknown as error:
            message = str(error)
            raise NotFound(f"{message[0].upper()}{message[1:]}.", param=error.param) from None
        return json_response(result if result is not None else {"done": True})

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        body = await read_body(dict(request.scope["headers"]), request.receive, MAX_BODY_BYTES)
        return validated(kind, body or b"{}")
