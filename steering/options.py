"""Limits and thresholds of the pool controller. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..transport.latency_bounds import LatencyBound

Mode = Literal["off", "advise", "act"]


@dataclass(frozen=True, slots=True)
class SteeringOptions:
    """``ttft_s``, ``tpot_s``: the objectives; ``attainment``: the share of requests that should meet both."""

    ttft_s: float
    tpot_s: float
    attainment: float = 0.9
    mode: Mode = "advise"
    every_s: float = 1.0
    window_s: float = 4.0  # the mix is that of the requests of this time ...
    longest_window_s: float = 60.0  # ... or of up to this time, until there are ``min_requests``
    min_requests: int = 60
    work_off_s: float = 10.0  # waiting requests should be served within it
    settle_s: float = 4.0  # after a flip, before the next one
    repeat_s: float = 60.0  # a proposal that was not carried out is repeated after it
    mixed_again_s: float = 300.0  # after the last mixed worker, which may come back: roles stay
    min_workers: int = 2
    max_workers: int = 0  # 0: scaling up is never proposed
    queue_depth: int = 50  # requests waiting in the coordinator: more is too many
    scale_up_above: float = 1.0  # load of the best ratio: above 1 no ratio meets the objectives
    scale_up_ttft: LatencyBound | None = None  # fewer requests than its share keep it: too slow
    scale_up_tpot: LatencyBound | None = None
    scale_up_utilisation: float = 1.0  # measured share in use of one role's workers; see ``PoolUse``
    scale_down_below: float = 0.6  # load, or use, of fewer workers that leaves room; far from 1: no flapping
    scale_up_by: int = 1  # workers at once
    scale_down_by: int = 1
    scale_up_after_s: float = 10.0
    scale_down_after_s: float = 120.0
    scale_cooldown_s: float = 60.0
    keep: tuple[str, ...] = ()  # names or patterns of workers that scaling down leaves alone
