"""Opens what the settings name of tenants: keys (and follows their file), limits and metering."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from ..background import Spawn
from ..errors import Unauthorized
from ..listeners import ListenerFailures
from .api_key import bearer, digest_of, same
from .limits import ANONYMOUS, Account
from .meter import Meter
from .settings import SQLITE, TenantSettings
from .shared_limiter import SharedLimiter
from .store import TenantStore
from .tenancy import Directory, Everyone, Limiter, NoLimits, Tenancy

LOOK_EVERY_S = 0.5
MISSING = "No API key was given: send it as `Authorization: Bearer KEY`."
WRONG = "The API key is not known here, or does not open any more."
_log = logging.getLogger(__name__)


class KeyDirectory:
    """A ``Directory`` of the keys in a tenants file. A lookup is one SHA-256 and one dict: 1 us.

    Finding a digest in a dict takes a time that depends on the digest, which reveals nothing about the key:
    nobody can choose a key so that its digest begins with given bytes. Digests are compared in constant time.
    """

    def __init__(self, path: Path) -> None:
        """Raises TenantsFileError."""
        self._store = TenantStore(path)
        self._path = path
        self._version = self._store.version()
        self._know(self._store.accounts(time.time()))
        if self._store.frozen:
            _log.error(
                "there is no space beside the tenants file %s: its keys are gone by as they are now, and "
                "changes are seen later",
                path,
            )
        if not self._accounts:
            _log.warning(
                "the tenants file %s has no key that opens: every request is refused until there is one", path
            )

    def _know(self, accounts: dict[bytes, Account]) -> None:
        self._accounts = accounts
        self._by_key = {account.key_id: account for account in accounts.values()}

    @property
    def frozen(self) -> bool:
        """Changes of the file are not seen, for want of space on its disk."""
        return self._store.frozen

    def account(self, authorization: bytes) -> Account:
        key = bearer(authorization)
        if not key:
            raise Unauthorized(MISSING)
        digest = digest_of(key)
        account = self._accounts.get(digest)
        if account is None or not same(account.digest, digest) or account.expires <= time.time():
            raise Unauthorized(WRONG)
        return account

    def account_of_key(self, key_id: int) -> Account | None:
        if key_id == 0:
            return ANONYMOUS
        account = self._by_key.get(key_id)
        return account if account is not None and account.expires > time.time() else None

    async def follow(self, every_s: float = LOOK_EVERY_S) -> None:
        """Read the file whenever it changes, until cancelled: a revoked key is out within a second."""
        while True:
            await asyncio.sleep(every_s)
            try:
                if self._store.frozen:
                    self._reopen()
                if (version := self._store.version()) != self._version:
                    self._know(await asyncio.to_thread(self._store.accounts, time.time()))
                    self._version = version
                    _log.info("the tenants file has changed: %d keys open", len(self._accounts))
            except Exception as error:  # keep the known keys while a disk is full or gone
                _log.error(
                    "still going by the old keys: cannot read the tenants file %s: %s", self._path, error
                )

    def _reopen(self) -> None:
        """Once there is space for it: changes are seen from then on."""
        store = TenantStore(self._path)
        if store.frozen:
            store.close()
            return
        self._store.close()
        self._store, self._version = store, -1

    def close(self) -> None:
        self._store.close()


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
