"""Settings of the pool controller."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..transport.latency_bounds import LatencyBound, attainment, notation, parse_bounds
from .options import SteeringOptions


class SteeringSettings(BaseModel):
    """The pool controller."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    steer: Literal["off", "advise", "act"] = Field(
        default="off",
        description="The pool controller. advise: propose changes of roles and of the number of "
        "workers; act: also make them. Needs --steer-slo.",
    )
    steer_slo: str = Field(
        default="",
        pattern=notation("ttft", "tpot"),
        description="What requests may take, in seconds, and the share that must keep both: "
        "ttft=2,tpot=0.05@p90; the largest percentile counts.",
    )
    steer_profile: Path | None = Field(
        default=None,
        description="The workers' latency model, made by `splitserve profile`. Without it, rules decide.",
    )
    steer_min_workers: int = Field(default=2, ge=2, le=65_536, description="Fewest workers.")
    steer_max_workers: int = Field(
        default=0, ge=0, le=65_536, description="Most workers. 0: only roles change."
    )
    steer_queue_depth: int = Field(
        default=50,
        ge=1,
        le=1_000_000,
        description="More waiting requests than these for --steer-scale-up-after-s: one more worker is "
        "wanted.",
    )
    steer_scale_up_latency: str = Field(
        default="",
        pattern=notation("ttft", "tpot"),
        description="Latencies above which one more worker is wanted: ttft=1@p95 for prefill, "
        "tpot=0.08@p99 for decode, with commas between.",
    )
    steer_scale_up_utilisation: float = Field(
        default=1,
        gt=0,
        le=1,
        description="Share in use above which a role wants one more worker: prefill workers' busy time, "
        "decode workers' rows or KV blocks. 1: never.",
    )
    steer_scale_up_by: int = Field(
        default=1, ge=1, le=65_536, description="Workers that come at once where more are wanted."
    )
    steer_scale_down_by: int = Field(
        default=1, ge=1, le=65_536, description="Workers that leave at once, at most, where fewer are enough."
    )
    steer_scale_up_after_s: float = Field(
        default=10, ge=0, le=86_400, description="Seconds for which more must have been wanted."
    )
    steer_scale_down_after_s: float = Field(
        default=120, ge=0, le=86_400, description="Seconds for which fewer must have been enough."
    )
    steer_cooldown_s: float = Field(
        default=60, ge=1, le=86_400, description="Seconds between two proposals of more or fewer workers."
    )
    steer_keep: str = Field(
        default="",
        max_length=65_536,
        description="Workers that scaling down leaves alone, with commas between; * stands for "
        "anything. `splitserve up` adds its own.",
    )
    steer_webhook: str | None = Field(
        default=None, pattern=r"^https?://\S+$", description="Every decision is posted to this URL, as JSON."
    )
    steer_command: str | None = Field(
        default=None,
        min_length=1,
        description="Starts and stops workers for --steer act: run with `up ROLE`, and with `down "
        "WORKER` once that has drained.",
    )

    @property
    def slo_bounds(self) -> dict[str, LatencyBound]:
        """--steer-slo, by name: ttft and tpot, or empty."""
        return _bounds("steer_slo", self.steer_slo)

    @property
    def steering(self) -> SteeringOptions | None:
        """Options of the pool controller; None: it is off."""
        if self.steer == "off":
            return None
        bounds, slow = self.slo_bounds, _bounds("steer_scale_up_latency", self.steer_scale_up_latency)
        return SteeringOptions(
            bounds["ttft"].seconds,
            bounds["tpot"].seconds,
            attainment(bounds),
            self.steer,
            min_workers=self.steer_min_workers,
            max_workers=self.steer_max_workers,
            queue_depth=self.steer_queue_depth,
            scale_up_ttft=slow.get("ttft"),
            scale_up_tpot=slow.get("tpot"),
            scale_up_utilisation=self.steer_scale_up_utilisation,
            scale_up_by=self.steer_scale_up_by,
            scale_down_by=self.steer_scale_down_by,
            scale_up_after_s=self.steer_scale_up_after_s,
            scale_down_after_s=self.steer_scale_down_after_s,
            scale_cooldown_s=self.steer_cooldown_s,
            keep=tuple(filter(None, self.steer_keep.split(","))),
        )

    @model_validator(mode="after")
    def _consistent_steering(self) -> Self:
        if self.steer != "off" and not self.steer_slo:
            raise ValueError("--steer needs to know what is good enough: give --steer-slo")
        _bounds("steer_scale_up_latency", self.steer_scale_up_latency)
        if self.steer_slo and set(self.slo_bounds) != {"ttft", "tpot"}:
            raise ValueError("--steer-slo needs a bound for each, ttft and tpot, as in ttft=2,tpot=0.05@p90")
        return self


def _bounds(name: str, text: str) -> dict[str, LatencyBound]:
    """Parse the bounds of an option. Raises ValueError that names it."""
    try:
        return parse_bounds(text)
    except ValueError as error:
        raise ValueError(f"--{name.replace('_', '-')}: {error}") from None
