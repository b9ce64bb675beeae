"""Whether the cluster should have one worker more or fewer, by the operators' rules. Pure; times in seconds.

more     for scale_up_after_s: the queue is deeper than queue_depth, or too few requests are good, or too few
         keep scale_up_ttft or scale_up_tpot, or more of a role's workers is in use than
         scale_up_utilisation, or even the best ratio is overloaded
fewer    for scale_down_after_s: none of that holds, the best ratio of one worker fewer would have room, and
         there is a worker that may leave

Where there are mixed workers nothing is predicted: one more, also mixed, by the queue and the share of good
requests; never fewer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Literal

from ..transport.latency_bounds import DEFAULT_PERCENT, LatencyBound
from ..transport.messages.messages import Role
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
        """Number of workers to add, as long as that holds."""
        self.role: AnyRole = "prefill"  # of these

    def decide(
        self,
        picture: LoadPicture,
        capacity: Capacity | None,
        prefill: int,
        decode: int,
        mixed: int,
        now: float,
        *,
        in_use: Mapping[Role, float],
        spare: Collection[Role],
    ) -> tuple[Kind, AnyRole, str] | None:
        """Return a change, its role and its reason, or None. ``mixed``: workers of both roles, counted in
        neither; then without a ``capacity``. ``in_use``: share in use of a role's workers; ``spare``: the
        roles of which a worker may leave."""
        options = self._options
        if not options.max_workers:
            return None
        short, lacking = self._shortage(picture, capacity, prefill, decode, in_use)
        room = "" if short else self._spare(picture, capacity, prefill, decode)
        self._short_since = (self._short_since if self._short_since is not None else now) if short else None
        self._idle_since = (self._idle_since if self._idle_since is not None else now) if room else None
        count, self.change = prefill + decode + mixed, 0
        if (
            self._short_since is not None
            and now - self._short_since >= options.scale_up_after_s
            and count < options.max_workers
        ):
            self.change, self.role = (
                1,
                "mixed" if mixed else lacking or self._comes(picture, capacity, prefill, decode),
            )
        if (
            self._idle_since is not None
            and now - self._idle_since >= options.scale_down_after_s
            and count > max(2, options.min_workers)
        ):
            going = self._goes(picture, capacity, prefill, decode, spare)
            self.change, self.role = (-1, going) if going else (0, self.role)
        if not self.change or now < self._quiet_until:
            return None
        self._quiet_until = now + options.scale_cooldown_s
        if self.change > 0:
            return "scale_up", self.role, f"{short} for {options.scale_up_after_s:g} s"
        return "scale_down", self.role, f"{room} for {options.scale_down_after_s:g} s"

    def _shortage(
        self,
        picture: LoadPicture,
        capacity: Capacity | None,
        prefill: int,
        decode: int,
        in_use: Mapping[Role, float],
    ) -> tuple[str, Role | None]:
        """Return the shortage of workers as a sentence, and its role where that shows; empty: none."""
        options = self._options
        if picture.num_waiting > options.queue_depth:
            return f"{picture.num_waiting} requests waited, more than {options.queue_depth}", None
        if picture.num_judged >= MIN_JUDGED and picture.attainment < options.attainment:
            return (
                f"{picture.attainment:.0%} of requests were good, fewer than {options.attainment:.0%}",
                None,
            )
        kept: tuple[tuple[Role, str, LatencyBound | None, float], ...] = (
            ("prefill", "TTFT", options.scale_up_ttft, picture.ttft_kept),
            ("decode", "TPOT", options.scale_up_tpot, picture.tpot_kept),
        )
        for role, what, bound, share in kept:
            if bound is not None and share < (wanted := bound.share or DEFAULT_PERCENT / 100):
                return (
                    (
                        f"the {what} of {share:.0%} of requests was at most {bound.seconds:g} s, fewer "
                        f"than {wanted:.0%}"
                    ),
                    role,
                )
        for role, use in in_use.items():
            if use > options.scale_up_utilisation:
                return (
                    (
                        f"{use:.0%} of the {role} workers was in use, more than "
                        f"{options.scale_up_utilisation:.0%}"
                    ),
                    role,
                )
        if capacity is not None and picture.num_requests >= MIN_JUDGED:
            _, best = capacity.best(picture, prefill + decode)
            if math.isfinite(best.worst) and best.worst > options.scale_up_above:
                return (
                    f"the load was {best.worst:.2f} even in the best ratio of {prefill + decode} workers",
                    None,
                )
        return "", None

    def _spare(self, picture: LoadPicture, capacity: Capacity | None, prefill: int, decode: int) -> str:
        """Return why one worker fewer would do; empty if it would not, or that is unknown."""
        if capacity is None or prefill + decode <= 2:
            return ""
        _, fewer = capacity.best(picture, prefill + decode - 1)
        if fewer.worst >= self._options.scale_down_below or not math.isfinite(fewer.worst):
            return ""
        return f"the load would have been {fewer.worst:.2f} with {prefill + decode - 1} workers"

    def _comes(self, picture: LoadPicture, capacity: Capacity | None, prefill: int, decode: int) -> Role:
        """Return the role of one more worker."""
        if capacity is None:
            return "prefill" if picture.num_waiting else "decode"
        wanted, _ = capacity.best(picture, prefill + decode + 1)
        return "prefill" if wanted > prefill else "decode"

    def _goes(
        self,
        picture: LoadPicture,
        capacity: Capacity | None,
        prefill: int,
        decode: int,
        spare: Collection[Role],
    ) -> Role | None:
        """Return the role of the worker that leaves: that of which the best ratio has fewer. If none of those
        may leave, the other role, if the remaining ratio has room as it is. None: no worker may."""
        if capacity is None:
            return None
        wanted, _ = capacity.best(picture, prefill + decode - 1)
        order: tuple[Role, Role] = ("prefill", "decode") if wanted < prefill else ("decode", "prefill")
        first, second = order
        if first in spare:
            return first
        left = (
            capacity.pressure(picture, prefill - 1, decode)
            if second == "prefill"
            else capacity.pressure(picture, prefill, decode - 1)
        )
        return second if second in spare and left.worst < self._options.scale_down_below else None
