"""Limits of keys and tenants, and the account of a request. Plain values."""

from __future__ import annotations

from functools import cached_property
from hashlib import blake2b
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ..lifecycle.request import PriorityClass

Bound = Annotated[int, Field(ge=1, le=1 << 50)] | None


class Limits(BaseModel):
    """Bounds of one key or one tenant; None: no bound. Tokens are those of prompts and of answers
    together."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    requests_per_minute: Bound = Field(default=None, description="Requests a minute.")
    tokens_per_minute: Bound = Field(default=None, description="Tokens of prompts and answers a minute.")
    max_streams: Bound = Field(default=None, description="Requests that may be open at the same time.")
    tokens_per_day: Bound = Field(default=None, description="Tokens from 0:00 to 24:00 UTC.")
    tokens_per_month: Bound = Field(default=None, description="Tokens of one calendar month, by UTC.")

    @cached_property
    def bounded(self) -> bool:
        """Whether any bound is set."""
        return any(getattr(self, name) is not None for name in type(self).model_fields)


LIMIT_NAMES = tuple(Limits.model_fields)
TIER_LIMIT_NAMES = (*LIMIT_NAMES, "max_stored_mib")
MAX_STORED_MIB = 10_240
"""Unless a tier has another bound."""
Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f/]+$")]
"""The name of a tenant or a tier."""
ZeroOrMore = Annotated[int, Field(ge=0, le=1 << 50)] | None


class NewLimits(BaseModel):
    """Limits to set. None: as it is; 0: no bound."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    requests_per_minute: ZeroOrMore = Field(default=None, description="Requests a minute; 0: no bound.")
    tokens_per_minute: ZeroOrMore = Field(
        default=None, description="Tokens of prompts and answers a minute; 0: no bound."
    )
    max_streams: ZeroOrMore = Field(
        default=None, description="Requests that may be open at the same time; 0: no bound."
    )
    tokens_per_day: ZeroOrMore = Field(
        default=None, description="Tokens from 0:00 to 24:00 UTC; 0: no bound."
    )
    tokens_per_month: ZeroOrMore = Field(
        default=None, description="Tokens of one calendar month, by UTC; 0: no bound."
    )

    def limits(self) -> dict[str, int | None]:
        """Return the limits by name; None: not given."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in TIER_LIMIT_NAMES}


class NewTierLimits(NewLimits):
    """Those of a tier, too, which no key has of its own."""

    max_stored_mib: ZeroOrMore = Field(
        default=None,
        description="MiB of files and batches, and as many of stored responses; 0: no bound. "
        f"Default: as it is; {MAX_STORED_MIB}.",
    )


UNLIMITED = Limits()
Rows = tuple[tuple[int, Limits], ...]


class Account(BaseModel):
    """One key and its tenant, as a request needs them: looked up once a request, and never changed."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    tenant: str = ""
    tenant_id: int = 0
    key_id: int = 0
    priority_class: PriorityClass = "standard"
    salt: bytes = b""
    tenant_limits: Limits = UNLIMITED
    key_limits: Limits = UNLIMITED
    max_stored_bytes: int | None = None
    digest: bytes = b""
    expires: float = float("inf")  # unix seconds

    @cached_property
    def rows(self) -> Rows:
        """The holders of its limits: tenant and key, as far as they have limits, each by a unique number."""
        both = ((2 * self.tenant_id, self.tenant_limits), (2 * self.key_id + 1, self.key_limits))
        return tuple([(row, limits) for row, limits in both if limits.bounded])

    @cached_property
    def key(self) -> str:
        """The key's name in records and logs; empty without a key."""
        return f"key_{self.key_id}" if self.key_id else ""


ANONYMOUS = Account()
"""The account of every request where no keys are configured."""


def salt_of(tenants: bytes, client: str) -> bytes:
    """Return the salt of a request's prefix cache: its tenant's, and within that the client's own."""
    return blake2b(tenants + client.encode(errors="replace"), digest_size=32).digest() if client else tenants
