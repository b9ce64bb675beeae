"""Whether the whole should have one worker more or fewer, by the rules that operators write. Pure; times in seconds.

more     for scale_up_after_s: the queue is deeper than queue_depth, or too few requests are good, or even the best ratio is overloaded
fewer    for scale_down_after_s: nothing of that, and the best ratio of one worker fewer would have room

Where there are mixed workers nothing is predicted: one more, which is mixed too, by the queue and by what is good; never fewer.
"""

from __future__ import annotations

import math
from typing import Literal

from ...transport.messages import Role
from .capacity import Capacity
from .load_watch import MIN_JUDGED, LoadPicture
from .options import SteeringOptions

Kind = Literal["scale_up", "scale_down"]
AnyRole = Role | Literal["mixed"]


class Scaling:
    """Proposes one worker at a time."""

    def __init__(self, options: SteeringOptions) -> None:
        self._options = options
        self._short_since: float | None = None
        self._idle_since: float | None = None
        self._quiet_until = -math.inf
        self.change = 0
        """How many workers more there should be, as long as that is so."""
        self.role: AnyRole = "prefill"  # of these

    def decide(
        self, picture: LoadPicture, capacity: Capacity | None, prefill: int, decode: int, now: float, mixed: int = 0
    ) -> tuple[Kind, AnyRole, str] | None:
        """What to do, of which role, and why; None: nothing. ``mixed``: workers of both roles, counted in neither; then without a
        ``capacity``."""
        options = self._options
        if not options.max_workers:
            return None
        short = self._shortage(picture, capacity, prefill, decode)
        spare = "" if short else self._spare(picture, capacity, prefill, decode)
        self._short_since = (self._short_since if self._short_since is not None else now) if short else None
        self._idle_since = (self._idle_since if self._idle_since is not None else now) if spare else None
        count, self.change = prefill + decode + mixed, 0
        if self._short_since is not None and now - self._short_since >= options.scale_up_after_s and count < options.max_workers:
            self.change = 1
        if self._idle_since is not None and now - self._idle_since >= options.scale_down_after_s and count > max(2, options.min_workers):
            self.change = -1
        if not self.change:
            return None
        role: AnyRole = "mixed" if mixed else self._role(picture, capacity, prefill, decode)
        self.role = role
        if now < self._quiet_until:
            return None
        self._quiet_until = now + options.scale_cooldown_s
        if self.change > 0:
            return "scale_up", role, f"{short} for {options.scale_up_after_s:g} s"
        return "scale_down", role, f"{spare} for {options.scale_down_after_s:g} s"

    def _shortage(self, picture: LoadPicture, capacity: Capacity | None, prefill: int, decode: int) -> str:
        """Of workers, as a sentence; empty where there is none."""
        options = self._options
        if picture.num_waiting > options.queue_depth:
            return f"{picture.num_waiting} requests waited, more than {options.queue_depth}"
        if picture.num_judged >= MIN_JUDGED and picture.attainment < options.attainment:
            return f"{picture.attainment:.0%} of requests were good, fewer than {options.attainment:.0%}"
        if capacity is not None and picture.num_requests >= MIN_JUDGED:
            _, best = capacity.best(picture, prefill + decode)
            if math.isfinite(best.worst) and best.worst > options.scale_up_above:
                return f"the load was {best.worst:.2f} even in the best ratio of {prefill + decode} workers"
        return ""

    def _spare(self, picture: LoadPicture, capacity: Capacity | None, prefill: int, decode: int) -> str:
        """Why one worker fewer would do; empty where it would not, or nobody knows."""
        if capacity is None or prefill + decode <= 2:
            return ""
        _, fewer = capacity.best(picture, prefill + decode - 1)
        if fewer.worst >= self._options.scale_down_below or not math.isfinite(fewer.worst):
            return ""
        return f"the load would have been {fewer.worst:.2f} with {prefill + decode - 1} workers"

    def _role(self, picture: LoadPicture, capacity: Capacity | None, prefill: int, decode: int) -> Role:
        """Of the worker that comes or goes."""
        if capacity is None:
            return "prefill" if picture.num_waiting else "decode"
        wanted, _ = capacity.best(picture, prefill + decode + self.change)
        if self.change > 0:
            return "prefill" if wanted > prefill else "decode"
        return "prefill" if wanted < prefill and prefill > 1 else "decode" if decode > 1 else "prefill"
