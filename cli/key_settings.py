"""Settings of ``splitserve keys ...``."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ..coordinator.lifecycle.request import PriorityClass
from ..coordinator.tenants.limits import Name, NewLimits, NewTierLimits


class _OfTenantsFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    tenants_file: Path = Field(description="The file with tenants and keys; `create` and `tenant` make it.")


class _Limited(NewLimits, _OfTenantsFile):
    """In this order, by which the file comes first in the help."""


class KeysCreateSettings(_Limited):
    """Makes a key and prints it, this once: only its hash is kept. The limits are the key's own, beside those
    of its tenant's tier."""

    tenant: Name = Field(description="Whose key, without slashes; a tenant that is new is made.")
    tier: str | None = Field(
        default=None,
        description="The tenant's tier from now on. Default: as it is; a new tenant's: standard.",
    )
    name: str = Field(default="", max_length=256, description="What the key is for, for people.")
    expires_in_s: float | None = Field(
        default=None, gt=0, le=1e10, description="Seconds until it ends. Default: it does not."
    )


class KeysListSettings(_OfTenantsFile):
    """Lists tiers, tenants and keys, without any secret."""


class KeysRotateSettings(_OfTenantsFile):
    """Makes a key in another one's place and prints it, this once; the old one opens for a while yet."""

    key: str = Field(description="The old key's number, as `list` shows it: key_12.")
    grace_s: float = Field(default=86_400, ge=0, le=1e8, description="Seconds that the old key opens yet.")


class KeysRevokeSettings(_OfTenantsFile):
    """Ends a key: within a second no coordinator takes it."""

    key: str = Field(description="The key's number, as `list` shows it: key_12.")


class KeysTenantSettings(_OfTenantsFile):
    """Makes a tenant or changes it."""

    tenant: Name = Field(description="Its name, without slashes.")
    tier: str | None = Field(
        default=None, description="Its tier from now on. Default: as it is; a new tenant's: standard."
    )
    shared_cache: str | None = Field(
        default=None,
        max_length=256,
        description="Group whose tenants share one prefix cache, and can guess by its speed the prompts "
        "of the others; empty: none, the default.",
    )


class KeysTierSettings(NewTierLimits, _OfTenantsFile):
    """Makes a tier or changes it: the priority and the limits of each of its tenants."""

    tier: Name = Field(description="Its name, without slashes.")
    priority_class: PriorityClass | None = Field(
        default=None, description="Its share when workers are scarce. Default: as it is; standard."
    )
