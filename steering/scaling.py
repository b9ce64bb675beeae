"""Whether the whole should have one worker more or fewer, by the rules that operators write. Pure; times in
seconds.

more     for scale_up_after_s: the queue is deeper than queue_depth, or too few requests are good, or too few keep scale_up_ttft or
         scale_up_tpot, or more of a role's workers is in use than scale_up_utilisation, or even the best
         ratio is overloaded
fewer    for scale_down_after_s: nothing of that, the best ratio of one worker fewer would have room, and there is one that may go

Where there are mixed workers nothing is predicted: one more, which is mixed too, by the queue and by what is
good; never fewer.
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
        """How many workers more there should be, as long as that is so."""
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
        """What to do, of which role, and why; None: nothing. ``mixed``: workers of both roles, counted in
        neither; then without a ``capacity``. ``in_use``: how much of the workers of a role is; ``spare``: the
        roles of which a worker may go."""
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
        """Of workers, as a sentence, and of which role where that shows; empty where there is none."""
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
        """Why one worker fewer would do; empty where it would not, or nobody knows."""
        if capacity is None or prefill + decode <= 2:
            return ""
        _, fewer = capacity.best(picture, prefill + decode - 1)
        if fewer.worst >= self._options.scale_down_below or not math.isfinite(fewer.worst):
            return ""
        return f"the load would have been {fewer.worst:.2f} with {prefill + decode - 1} workers"

    def _comes(self, picture: LoadPicture, capacity: Capacity | None, prefill: int, decode: int) -> Role:
        """The role of one more worker."""
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
        """The role of the worker that goes: the one that the best ratio has fewer of; where none of those may
        go, the other one, if the ratio that is left has room as it is. None: there is none that may."""
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
