"""Tenants, tiers and keys in one SQLite file. Written by ``splitserve keys`` and the admin API; read by every
coordinator process.

    tiers    a name, a priority class, the limits of each of its tenants
    tenants  a name, a tier, the salt of its prefix cache (or the group that it shares one with)
    keys     a tenant, the SHA-256 of the key, limits of its own, when it ends

Numbers of tenants and keys are never used twice: usage records and limits name them.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...transport.process.private_files import OpenToOthers, make_private
from ..full_disk import is_full
from ..lifecycle.request import PriorityClass
from ..stored_bytes import transaction
from .api_key import digest_of, hint_of, new_key
from .errors import TenantsFileError, Unknown
from .limits import LIMIT_NAMES, MAX_STORED_MIB, TIER_LIMIT_NAMES, Account, Limits

SALT_BYTES = 16
VERSION = 1
BUSY_S = 5.0
_LIMIT_COLUMNS = ", ".join(f"{name} INTEGER" for name in LIMIT_NAMES)
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS tiers (name TEXT PRIMARY KEY, priority_class TEXT NOT NULL, {_LIMIT_COLUMNS});
CREATE TABLE IF NOT EXISTS cache_groups (name TEXT PRIMARY KEY, salt BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS tenants (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL,
    tier TEXT NOT NULL REFERENCES tiers, salt BLOB NOT NULL, cache_group TEXT REFERENCES cache_groups,
    created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS keys (id INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant_id INTEGER NOT NULL REFERENCES tenants, name TEXT NOT NULL, digest BLOB UNIQUE NOT NULL,
    hint TEXT NOT NULL, created REAL NOT NULL, expires REAL, {_LIMIT_COLUMNS});
INSERT OR IGNORE INTO tiers (name, priority_class) VALUES
    ('premium', 'premium'), ('standard', 'standard'), ('free', 'free'), ('batch', 'batch');
PRAGMA user_version = {VERSION};
"""


@dataclass(frozen=True, slots=True)
class NewKey:
    """``key`` is shown this once."""

    id: str
    tenant: str
    key: str


class TenantStore:
    """One connection; of one thread at a time."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Raises TenantsFileError where it cannot be used."""
        if not create and not path.is_file():
            raise TenantsFileError(
                f"there is no tenants file {path}; `splitserve keys create --tenants-file {path} "
                "--tenant NAME` makes it"
            )
        self.frozen = False
        """Read as it is, because its disk has no space for SQLite's own files; changes are not seen."""
        try:
            make_private("the tenants file", path)
            self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            if not create:
                self._open_as_it_is(path)
            self._db.row_factory = sqlite3.Row
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise TenantsFileError(
                    f"{path} was written by a newer splitserve (version {version}; this one knows {VERSION})"
                )
            self._db.execute("PRAGMA foreign_keys = ON")
            if version < VERSION:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.executescript(SCHEMA)
            if "max_stored_mib" not in self.tiers()[0]:
                self._bound_storage()
        except OpenToOthers as error:
            raise TenantsFileError(str(error)) from None
        except (sqlite3.Error, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TenantsFileError(f"cannot use the tenants file {path}: {reason}") from None

    def _bound_storage(self) -> None:
        """Earlier files had no limit for it. Their versions go on with this one: it is still VERSION."""
        with transaction(self._db):
            if "max_stored_mib" not in self.tiers()[0]:  # another process may have been first
                self._db.execute(
                    f"ALTER TABLE tiers ADD COLUMN max_stored_mib INTEGER DEFAULT {MAX_STORED_MIB}"
                )

    def _open_as_it_is(self, path: Path) -> None:
        """Falls back on a connection that needs nothing beside the file where the disk is full. Raises
        sqlite3.Error."""
        try:
            self._db.execute("PRAGMA user_version").fetchone()
        except sqlite3.Error as error:
            log = path.with_name(f"{path.name}-wal")
            if not is_full(error) or (log.exists() and log.stat().st_size):
                raise
            self._db.close()
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?immutable=1",
                uri=True,
                isolation_level=None,
                check_same_thread=False,
            )
            self.frozen = True

    def close(self) -> None:
        self._db.close()

    def version(self) -> int:
        """A number that changes when another connection has changed the file."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    # --- tiers -----------------------------------------------------------------------------------

    def set_tier(
        self, name: str, priority_class: PriorityClass | None, limits: Mapping[str, int | None]
    ) -> None:
        """Makes or changes a tier; a limit that is not named stays, 0 takes it away."""
        if (
            priority_class is not None
            or not self._db.execute("SELECT 1 FROM tiers WHERE name = ?", (name,)).fetchone()
        ):
            query = (
                "INSERT INTO tiers (name, priority_class) VALUES (?, ?) ON CONFLICT DO UPDATE SET "
                "priority_class = excluded.priority_class"
            )
            self._db.execute(query, (name, priority_class or "standard"))
        self._set_limits("tiers", "name", name, limits)

    def tiers(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self._db.execute("SELECT * FROM tiers ORDER BY name")]

    # --- tenants ---------------------------------------------------------------------------------

    def set_tenant(self, name: str, *, tier: str | None = None, shared_cache: str | None = None) -> None:
        """Makes or changes a tenant. ``shared_cache``: the group whose tenants share one prefix cache on
        purpose; empty: none. Raises Unknown."""
        known = [row["name"] for row in self.tiers()]
        if tier is not None and tier not in known:
            more = "`splitserve keys tier` makes more"
            raise Unknown(f"there is no tier {tier!r}; there are {', '.join(known)}, and {more}", "tier")
        row = (name, tier or "standard", secrets.token_bytes(SALT_BYTES), time.time())
        self._db.execute("INSERT OR IGNORE INTO tenants (name, tier, salt, created) VALUES (?, ?, ?, ?)", row)
        if tier is not None:
            self._db.execute("UPDATE tenants SET tier = ? WHERE name = ?", (tier, name))
        if shared_cache is not None:
            if shared_cache:
                group = (shared_cache, secrets.token_bytes(SALT_BYTES))
                self._db.execute("INSERT OR IGNORE INTO cache_groups VALUES (?, ?)", group)
            self._db.execute(
                "UPDATE tenants SET cache_group = ? WHERE name = ?", (shared_cache or None, name)
            )

    def tenants(self) -> list[dict[str, Any]]:
        """Without their salts."""
        query = "SELECT id, name, tier, cache_group AS shared_cache, created FROM tenants ORDER BY id"
        return [dict(row) for row in self._db.execute(query)]

    # --- keys ------------------------------------------------------------------------------------

    def create_key(
        self,
        tenant: str,
        name: str = "",
        limits: Mapping[str, int | None] | None = None,
        expires: float | None = None,
    ) -> NewKey:
        """Make a key of an existing tenant. ``expires``: unix seconds. Raises Unknown."""
        found = self._db.execute("SELECT id FROM tenants WHERE name = ?", (tenant,)).fetchone()
        if found is None:
            raise Unknown(f"there is no tenant {tenant!r}; `splitserve keys tenant` makes one", "tenant")
        key = new_key()
        row = (found["id"], name, digest_of(key.encode()), hint_of(key), time.time(), expires)
        query = "INSERT INTO keys (tenant_id, name, digest, hint, created, expires) VALUES (?, ?, ?, ?, ?, ?)"
        key_id = self._db.execute(query, row).lastrowid
        self._set_limits("keys", "id", key_id, limits or {})
        return NewKey(f"key_{key_id}", tenant, key)

    def rotate_key(self, key: str, grace_s: float) -> NewKey:
        """A new key with the old one's tenant, name and limits; the old one opens for ``grace_s`` seconds
        more. Raises Unknown."""
        old = self._key(key)
        limits = {name: old[name] for name in LIMIT_NAMES}
        fresh = self.create_key(old["tenant"], old["name"], limits, old["expires"])
        self.revoke_key(key, grace_s)
        return fresh

    def revoke_key(self, key: str, grace_s: float = 0.0) -> None:
        """It opens for ``grace_s`` seconds more, at most. Raises Unknown."""
        old, ends = self._key(key), time.time() + grace_s
        self._db.execute(
            "UPDATE keys SET expires = ? WHERE id = ?", (min(ends, old["expires"] or ends), old["id"])
        )

    def keys(self) -> list[dict[str, Any]]:
        """Without their digests."""
        limits = ", ".join(LIMIT_NAMES)
        query = f"""SELECT 'key_' || k.id AS key, t.name AS tenant, k.name, hint, k.created, expires, {limits}
            FROM keys k JOIN tenants t ON t.id = k.tenant_id ORDER BY k.id"""
        return [dict(row) for row in self._db.execute(query)]

    def accounts(self, now: float) -> dict[bytes, Account]:
        """Every key that opens, by its digest."""
        limits = ", ".join(f"k.{n} AS key_{n}, r.{n} AS tenant_{n}" for n in LIMIT_NAMES)
        query = f"""SELECT k.id AS key_id, k.digest, k.expires, t.id AS tenant_id, t.name AS tenant,
            coalesce(g.salt, t.salt) AS salt, r.priority_class, r.max_stored_mib, {limits}
            FROM keys k JOIN tenants t ON t.id = k.tenant_id JOIN tiers r ON r.name = t.tier
            LEFT JOIN cache_groups g ON g.name = t.cache_group WHERE k.expires IS NULL OR k.expires > ?"""
        return {row["digest"]: _account(row) for row in self._db.execute(query, (now,))}

    def _key(self, key: str) -> sqlite3.Row:
        query = """SELECT k.*, t.name AS tenant FROM keys k JOIN tenants t ON t.id = k.tenant_id
            WHERE 'key_' || k.id = ?"""
        found: sqlite3.Row | None = self._db.execute(query, (key,)).fetchone()
        if found is None:
            raise Unknown(f"there is no key {key!r}; `splitserve keys list` shows them", "key")
        return found

    def _set_limits(self, table: str, column: str, value: object, limits: Mapping[str, int | None]) -> None:
        for name, limit in limits.items():
            if limit is not None:
                assert name in TIER_LIMIT_NAMES, name
                self._db.execute(f"UPDATE {table} SET {name} = ? WHERE {column} = ?", (limit or None, value))


def _account(row: sqlite3.Row) -> Account:
    return Account(
        tenant=row["tenant"],
        tenant_id=row["tenant_id"],
        key_id=row["key_id"],
        priority_class=row["priority_class"],
        salt=row["salt"],
        tenant_limits=Limits(**{name: row[f"tenant_{name}"] for name in LIMIT_NAMES}),
        key_limits=Limits(**{name: row[f"key_{name}"] for name in LIMIT_NAMES}),
        max_stored_bytes=None if (most := row["max_stored_mib"]) is None else most << 20,
        digest=row["digest"],
        expires=row["expires"] if row["expires"] is not None else float("inf"),
    )
