"""Opens what the settings name of tenants: keys, limits and metering."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from ..background import Spawn
from ..listeners import ListenerFailures
from .directory import KeyDirectory
from .meter import Meter
from .settings import SQLITE, TenantSettings
from .shared_limiter import SharedLimiter
from .tenancy import Directory, Everyone, Limiter, NoLimits, Tenancy

DAY_S = 86_400.0


@asynccontextmanager
async def tenancy_of(
    settings: TenantSettings, failures: ListenerFailures, spawn: Spawn
) -> AsyncIterator[Tenancy]:
    """Open what the settings name; close it after the last request. Raises TenantsFileError."""
    async with AsyncExitStack() as stack:
        directory: Directory = Everyone()
        if settings.tenants_file is not None:
            directory = keys = KeyDirectory(settings.tenants_file)
            stack.callback(keys.close)
            stack.callback(spawn("keys of tenants", keys.follow()).cancel)
        meter = _meter_of(settings, failures)
        if meter is not None:
            meter.start()
            stack.push_async_callback(asyncio.to_thread, meter.stop)
        limiter = _limiter_of(settings)
        await limiter.start(spawn)
        stack.push_async_callback(limiter.stop)
        yield Tenancy(directory, limiter, meter)


def _limiter_of(settings: TenantSettings) -> Limiter:
    if settings.tenants_file is None:
        return NoLimits()
    if settings.redis_url is not None:
        from .redis_limiter import RedisLimiter  # needs the extra `redis`

        return RedisLimiter(settings.redis_url)
    return SharedLimiter(settings.tenants_file.with_name(settings.tenants_file.name + "-limits"))


def _meter_of(settings: TenantSettings, failures: ListenerFailures) -> Meter | None:
    url = settings.metered_to
    if url is None:
        return None
    beside = (
        settings.tenants_file
        or Path(url.removeprefix(SQLITE) if url.startswith(SQLITE) else "usage").absolute()
    )
    keep_s = None if settings.usage_retention_days is None else settings.usage_retention_days * DAY_S
    soon = asyncio.get_running_loop().call_soon
    return Meter(url, beside.parent, f"{beside.name}-journal-", soon=soon, keep_s=keep_s, failures=failures)
