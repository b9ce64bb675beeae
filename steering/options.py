"""What the pool controller may do, and when. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..transport.latency_bounds import LatencyBound

Mode = Literal["off", "advise", "act"]


@dataclass(frozen=True, slots=True)
class SteeringOptions:
    """``ttft_s``, ``tpot_s``: what requests may take; ``attainment``: which share of them."""

    ttft_s: float
    tpot_s: float
    attainment: float = 0.9
    mode: Mode = "advise"
    every_s: float = 1.0
    window_s: float = 4.0  # the mix is that of the requests that came in the last so many seconds ...
    longest_window_s: float = 60.0  # ... or in more, until it is of ``min_requests``
    min_requests: int = 60
    work_off_s: float = 10.0  # what waits is to be gone within so long
    act_above: float = (
        0.85  # of the load at which the objectives would just be met: below, no flip is worth its risk
    )
    hysteresis: float = 0.15  # the other ratio must have so much less load on its busier role
    undo_s: float = 600.0  # for so long the way back must bring twice as much
    confirm_s: float = 2.0  # and go on being better for so long
    settle_s: float = 4.0  # after a flip, before the next one
    repeat_s: float = 60.0  # what was not taken up is said again after so long
    flip_cost_s: float = 2.0  # of one worker's time; it must be won back within ``gain_over_s``
    gain_over_s: float = 30.0
    regret_s: float = 20.0  # a flip that has made things worse is taken back after so long
    hold_s: float = 60.0  # and nothing is tried for so long; twice as long after each further one
    mixed_again_s: float = (
        300.0  # mixed workers that have gone may come back for so long: until then roles stay as beside them
    )
    min_workers: int = 2
    max_workers: int = 0  # 0: whatever is there; scaling up is never proposed
    queue_depth: int = 50  # requests waiting in the coordinator: more is too many
    scale_up_above: float = 1.0  # load of the best ratio
    scale_up_ttft: LatencyBound | None = None  # fewer requests than its share keep it: too slow
    scale_up_tpot: LatencyBound | None = None
    scale_up_utilisation: float = (
        1.0  # of the workers of one role: what is in use of them, measured; see ``PoolUse``
    )
    scale_down_below: float = 0.6  # load of the best ratio of one worker fewer
    scale_up_after_s: float = 10.0
    scale_down_after_s: float = 120.0
    scale_cooldown_s: float = 60.0
    keep: tuple[str, ...] = ()  # workers that never go for having little to do, by name or pattern
