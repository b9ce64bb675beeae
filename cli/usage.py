"""``splitserve usage``: totals of the usage records."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Self

import click
import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..coordinator.errors import InvalidRequest
from ..coordinator.routes.usage import groups, moment, month_start, totals
from ..traces.console import figures_table, result_console


class UsageSettings(BaseModel):
    """Shows what requests have used: tokens, KV cache, time, by tenant or otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    tenants_file: Path | None = Field(
        default=None, description="The tenants file, beside which usage is kept by default."
    )
    usage_url: str | None = Field(
        default=None, description="The database: sqlite:///PATH or postgresql://USER@HOST/DATABASE."
    )
    by: str = Field(
        default="tenant",
        description="Rows by tenant, key, model, endpoint, priority_class, status, day: one or more, with "
        "commas.",
    )
    since: str = Field(
        default="",
        description="From this time on: 2026-11-30, 2026-11-30T12:00 (UTC) or unix seconds. Default: this "
        "month.",
    )
    until: str = Field(default="", description="Up to this time. Default: now.")
    as_json: bool = Field(default=False, description="Print JSON.")

    @property
    def url(self) -> str:
        """The database."""
        return self.usage_url or f"sqlite:///{self.tenants_file}-usage"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.usage_url is None and self.tenants_file is None:
            raise ValueError("give --usage-url or --tenants-file")
        return self


def show(settings: UsageSettings) -> int:
    """Prints the totals; returns the exit status."""
    try:
        by = groups(settings.by)
        rows = totals(
            settings.url, by, moment(settings.since, month_start()), moment(settings.until, time.time())
        )
    except InvalidRequest as error:
        click.echo(f"splitserve: {error.message}", err=True)
        return 2
    if settings.as_json:
        click.echo(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
        return 0
    names = (name.replace("_", " ") for name in (rows[0] if rows else [*by, "requests"]))
    table = figures_table(*names, words=len(by))
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:,.0f}" for value in row.values()))
    result_console().print(table, markup=False)
    return 0
