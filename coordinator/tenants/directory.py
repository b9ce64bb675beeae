"""The valid API keys in memory, read again whenever the tenants file has changed."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from ..errors import Unauthorized
from .api_key import bearer, digest_of, same
from .limits import ANONYMOUS, Account
from .store import TenantStore

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
