"""Settings of the coordinator's records: logs, traces, prices."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from ...transport.process.settings import ReportSettings


class RecordSettings(ReportSettings):
    """Logs, traces and metrics."""

    log_requests: bool = Field(
        default=False, description="Log a line for each request that is over, with where its time went."
    )
    log_bodies: Path | None = Field(
        default=None,
        description="Write requests and their answers into this file, as JSON lines: personal data. "
        "With --processes: FILE-N.",
    )
    trace_folder: Path | None = Field(
        default=None,
        description="Write the load as a trace for `splitserve trace`, `simulate` and `plan` into this "
        "folder, without text.",
    )
    trace_token_times: bool = Field(
        default=False, description="With --trace-folder: write when each token came."
    )
    trace_sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced, unless the client decides by its traceparent.",
    )
    price_per_hour: float | None = Field(
        default=None,
        ge=0,
        le=1e9,
        description="Price of one GPU (without GPUs: worker) for an hour, for the price of output "
        "tokens in /metrics.",
    )

    @model_validator(mode="after")
    def _consistent_records(self) -> Self:
        if self.trace_token_times and self.trace_folder is None:
            raise ValueError("--trace-token-times writes into the trace file: give --trace-folder")
        return self
