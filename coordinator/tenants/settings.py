"""Settings of tenants: their keys, what they may use, and where it is recorded."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

SQLITE = "sqlite:///"
REDIS_URL = r"^rediss?://\S+$|^unix://\S+$"


class TenantSettings(BaseModel):
    """Tenants, keys, limits and metering."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    tenants_file: Path | None = Field(
        default=None,
        description="Tenants and API keys, made by `splitserve keys`. Default: no keys, and only this "
        "host is served.",
    )
    usage_url: str | None = Field(
        default=None,
        pattern=r"^(sqlite:///|postgres(ql)?://).+$",
        description="Database of usage records: sqlite:///PATH or postgresql://USER@HOST/DATABASE. "
        "Default: a SQLite file beside the tenants file.",
    )
    usage_retention_days: float | None = Field(
        default=None,
        gt=0,
        le=36_500,
        description="Days after which usage records are deleted. Default: never.",
    )
    redis_url: str | None = Field(
        default=None,
        pattern=REDIS_URL,
        description="Redis for limits of coordinators on several hosts, redis://HOST:6379/0. Default: a "
        "file beside the tenants file, for one host.",
    )

    @property
    def metered_to(self) -> str | None:
        """The database for usage records; None: nothing is metered."""
        if self.usage_url is None and self.tenants_file is not None:
            return f"{SQLITE}{self.tenants_file}-usage"
        return self.usage_url
