"""Settings that every serving process has: the coordinator and the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
DNS = "dns://"  # begins the name of coordinators that are found while a worker runs


class ReportSettings(BaseModel):
    """Destinations of logs and traces."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    log_level: LogLevel = Field(
        default="info", description="Least level that is logged; SIGUSR2 toggles debug."
    )
    log_format: LogFormat = Field(
        default="text", description="text, or json: one object a line, with request ids."
    )
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://\S+$",
        description="Send traces to this OTLP receiver, http://HOST:4318/v1/traces; needs splitserve[otel].",
    )


class ClusterKeySettings(BaseModel):
    """The cluster's key."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    key_file: Path | None = Field(
        default=None,
        description="The cluster's key, made by `splitserve keygen`; the same for all processes.",
    )
    insecure: bool = Field(
        default=False, description="No key: control connections are neither authenticated nor encrypted."
    )

    @model_validator(mode="after")
    def _with_or_without_key(self) -> Self:
        if (self.key_file is None) == (not self.insecure):
            raise ValueError(
                "give either --key-file (make one with `splitserve keygen FILE`) or --insecure, which uses "
                "no key"
            )
        return self
