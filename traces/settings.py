"""Settings of `splitserve trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .workload.notation import LENGTHS

# what may be given beside a workload file
DRAWN = {"rate", "output", "requests", "duration_s", "seed", "workload"}


class TraceReading(BaseModel):
    """How trace files are read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    disorder_s: float = Field(
        default=0,
        ge=0,
        le=31_536_000,
        description="Sort rows that are up to this many seconds of arrival time too late.",
    )
    drop_empty: bool = Field(
        default=False,
        description="Leave out requests without prompt or output tokens instead of refusing the file.",
    )


class TraceStatsSettings(TraceReading):
    """Prints statistics of traces: arrivals, bursts, lengths, and reuse of prompts by a prefix cache."""

    json_file: Path | None = Field(default=None, description="Write the statistics to this JSON file.")
    plot_file: Path | None = Field(
        default=None, description="Draw arrivals, gaps and lengths of every trace into this PNG file."
    )


class TraceConvertSettings(TraceReading):
    """Writes traces in splitserve's own format: thins and cuts each of them, mixes them if there are several,
    then scales time."""

    output: Path = Field(description="The file to write; gzip'ed if its name ends in .gz.")
    start_s: float = Field(
        default=0, ge=0, le=1e11, description="Leave out what arrives before this second; it becomes time 0."
    )
    end_s: float | None = Field(
        default=None, gt=0, le=1e11, description="Leave out what arrives from this second on."
    )
    max_requests: int | None = Field(default=None, ge=1, description="Most requests of each file.")
    keep: float = Field(
        default=1,
        gt=0,
        le=1,
        description="Share of the requests to keep, at their own times; sessions stay whole.",
    )
    scale: float | None = Field(
        default=None, gt=0, le=1e6, description="Compress time by this factor, which multiplies the rate."
    )
    rate: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Compress or stretch time to this mean rate, in requests per second.",
    )
    seed: int = Field(default=0, ge=0, le=4_294_967_295, description="Which requests --keep keeps.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.scale is not None and self.rate is not None:
            raise ValueError("--scale and --rate both set the rate: give one of them")
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError("--end-s must be after --start-s")
        return self


class TraceMakeSettings(BaseModel):
    """Draws a synthetic trace: from a fitted workload, or from the rate, burstiness, lengths and sessions
    given here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: Path = Field(description="The file to write; gzip'ed if its name ends in .gz.")
    requests: int | None = Field(default=None, ge=1, description="Number of requests.")
    duration_s: float | None = Field(
        default=None, gt=0, le=1e9, description="Seconds of the trace. This or --requests is needed."
    )
    seed: int = Field(
        default=0, ge=0, le=4_294_967_295, description="The same workload and seed give the same trace."
    )
    workload: Path | None = Field(
        default=None,
        description="Workload file as written by splitserve trace fit, or by hand (docs/planning.md). Only "
        "--rate changes it.",
    )
    rate: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Mean requests per second, all turns counted. Default: 1, or the workload's.",
    )
    burstiness: float = Field(
        default=1,
        ge=0,
        le=1000,
        description="Coefficient of variation of the (gamma) gaps between arrivals; 1: Poisson, 0: even.",
    )
    diurnal_amplitude: float = Field(
        default=0, ge=0, le=1, description="The rate swings by this share of itself over a day, as a sine."
    )
    prompt_len: str = Field(
        default="lognormal:512,1",
        pattern=LENGTHS,
        description="Prompt tokens (in sessions: a turn's new ones): N, uniform:LOW,HIGH, "
        "normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA.",
    )
    output_len: str = Field(
        default="lognormal:128,1", pattern=LENGTHS, description="Output tokens, in the same notation."
    )
    turns: float = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Mean turns of a session; each turn's prompt holds the turns before it.",
    )
    system_prompts: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="System prompts of 512 tokens that sessions share; the k-th is used 1/k as often as the "
        "first.",
    )
    max_len: int = Field(
        default=1 << 20,
        ge=2,
        le=1 << 20,
        description="Sessions end before prompt and output are longer than this.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.requests is None and self.duration_s is None:
            raise ValueError("--requests or --duration-s is needed: else the trace would have no end")
        fixed = sorted(self.model_fields_set - DRAWN)
        if self.workload is not None and fixed:
            flag = "--" + fixed[0].replace("_", "-")
            raise ValueError(f"{flag} cannot be given with --workload, whose file says it")
        if self.system_prompts and self.max_len < 514:
            raise ValueError("--max-len must leave room for two tokens after a system prompt of 512")
        return self


class TraceFitSettings(TraceReading):
    """Fits a workload to a trace, and shows beside the trace what is drawn from it."""

    output: Path = Field(
        description="The workload file (JSON) to write, for splitserve trace make --workload."
    )
    step_s: float = Field(
        default=10,
        gt=0,
        le=1e9,
        description="Seconds of one step of the rate over time. Short steps repeat the trace's bursts, long "
        "ones draw others.",
    )
    plot_file: Path | None = Field(
        default=None, description="Draw the trace and what is drawn from its fit into this PNG file."
    )
