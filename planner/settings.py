"""Settings of the planner's commands."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class TraceReading(BaseModel):
    """How trace files are read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    disorder_s: float = Field(
        default=0, ge=0, le=31_536_000, description="Rows may stand so many seconds of arrival time too late; they are put in order."
    )
    drop_empty: bool = Field(default=False, description="Leave out requests without prompt or output tokens instead of refusing the file.")


class TraceStatsSettings(TraceReading):
    """Tells what traces are like: arrivals, bursts, lengths, and how much of the prompts a prefix cache would have known."""

    json_file: Path | None = Field(default=None, description="Write the statistics to this JSON file.")
    plot_file: Path | None = Field(default=None, description="Draw arrivals, gaps and lengths of every trace into this PNG file.")
