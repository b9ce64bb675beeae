"""Whether the cluster should have more workers or fewer, by the operators' rules. Pure; times in seconds.

more     for scale_up_after_s: the queue is deeper than queue_depth, or too few requests are good, or too few
         keep scale_up_ttft or scale_up_tpot, or more of a role's workers is in use than
         scale_up_utilisation, or even the best ratio is overloaded
fewer    for scale_down_after_s: none of that holds, the best ratio of fewer workers would have room, and
         there are workers that may leave

Without a latency model nothing is predicted. A role has room then if less than scale_down_below of its
workers would be in use without those that leave. What a role lacks, the other gives by a flip if it has room;
only otherwise the cluster needs more workers.

Where there are mixed workers nothing is predicted either: one more, also mixed, by the queue and the share of
good requests; never fewer.
"""

from __future__ import annotations

import math

from ..transport.latency_bounds import DEFAULT_PERCENT, LatencyBound
from ..transport.messages.messages import Role
from .capacity import Capacity
from .fleet import AnyRole, Fleet, Kind
from .load_watch import MIN_JUDGED, LoadPicture
from .options import SteeringOptions
from .pool_use import ROLES

COMES_WITHIN_S = 600.0
"""A worker that was asked for counts as one that is here for as long, where it takes time to come."""


class Scaling:
    """Proposes one worker at a time."""

    def __init__(self, options: SteeringOptions) -> None:
        self._options = options
        self._short_since: float | None = None
        self._idle_since: float | None = None
        self._quiet_until = -math.inf
        self._awaited = 0  # workers, with those that were asked for, until ``_awaited_until``
        self._awaited_until = -math.inf
        self.change = 0
        """Number of workers to add, as long as that holds."""
        self.role: AnyRole = "prefill"  # of these

    def decide(
        self, picture: LoadPicture, capacity: Capacity | None, fleet: Fleet, now: float, *, holds: bool
    ) -> tuple[Kind, AnyRole, str] | None:
        """Return a change, its role and its reason, or None. A flip gives one worker to that role.
        ``holds``: there are mixed workers, or were lately; then without a ``capacity``."""
        options, self.change = self._options, 0
        if not options.max_workers and (capacity is not None or holds):
            return None
        short, lacking = self._shortage(picture, capacity, fleet)
        going, fewer, room = (None, 0, "") if short or holds else self._goes(picture, capacity, fleet)
        self._short_since = (self._short_since if self._short_since is not None else now) if short else None
        self._idle_since = (self._idle_since if self._idle_since is not None else now) if room else None
        kind: Kind = "scale_up"
        if self._short_since is not None and now - self._short_since >= options.scale_up_after_s:
            self.role = "mixed" if fleet.mixed else lacking or self._comes(picture, capacity, fleet)
            if capacity is None and not holds and self._may_flip(fleet, self.role):
                kind = "flip"
            else:
                self.change = max(0, min(options.scale_up_by, options.max_workers - fleet.num_workers))
            why = f"{short} for {options.scale_up_after_s:g} s"
        elif (
            self._idle_since is not None
            and now - self._idle_since >= options.scale_down_after_s
            and options.max_workers
            and going is not None
        ):
            kind, self.role, self.change = "scale_down", going, -fewer
            why = f"{room} for {options.scale_down_after_s:g} s"
        if not (self.change or kind == "flip") or now < self._quiet_until:
            return None
        if kind == "scale_up":
            awaited = max(fleet.num_workers, self._awaited if now < self._awaited_until else 0) + self.change
            if awaited > options.max_workers:
                return None  # ``change`` stays: an autoscaler that goes by it has asked for no more
            self._awaited, self._awaited_until = awaited, now + COMES_WITHIN_S
        elif kind == "scale_down":
            self._awaited = 0
        self._quiet_until = now + options.scale_cooldown_s
        return kind, self.role, why

    def _shortage(
        self, picture: LoadPicture, capacity: Capacity | None, fleet: Fleet
    ) -> tuple[str, Role | None]:
        """Return the shortage of workers as a sentence, and its role where that shows; empty: none."""
        options = self._options
        if picture.num_waiting > options.queue_depth:
            return f"{picture.num_waiting} requests waited, more than {options.queue_depth}", None
        if picture.num_judged >= MIN_JUDGED and picture.attainment < options.attainment:
            return (
                f"{picture.attainment:.0%} of requests were good, fewer than {options.attainment:.0%}",
                None
                if capacity is not None
                else ("prefill" if picture.in_time < picture.in_pace else "decode"),
            )
        kept: tuple[tuple[Role, str, LatencyBound | None, float], ...] = (
            ("prefill", "TTFT", options.scale_up_ttft, picture.ttft_kept),
            ("decode", "TPOT", options.scale_up_tpot, picture.tpot_kept),
        )
        for role, what, bound, share in kept:
            if bound is not None and share < (wanted := bound.share or DEFAULT_PERCENT / 100):
                kept_by = f"the {what} of {share:.0%} of requests was at most {bound.seconds:g} s"
                return f"{kept_by}, fewer than {wanted:.0%}", role
        for role, use in fleet.in_use.items():
            if use > options.scale_up_utilisation:
                used = f"{use:.0%} of the {role} workers was in use"
                return f"{used}, more than {options.scale_up_utilisation:.0%}", role
        if capacity is not None and picture.num_requests >= MIN_JUDGED:
            _, best = capacity.best(picture, fleet.num_workers)
            if math.isfinite(best.worst) and best.worst > options.scale_up_above:
                load = f"the load was {best.worst:.2f} even in the best ratio"
                return f"{load} of {fleet.num_workers} workers", None
        return "", None

    def _comes(self, picture: LoadPicture, capacity: Capacity | None, fleet: Fleet) -> Role:
        """Return the role that needs a worker more."""
        if capacity is None:
            return max(ROLES, key=lambda role: fleet.in_use.get(role, 0.0))
        wanted, _ = capacity.best(picture, fleet.num_workers + 1)
        return "prefill" if wanted > fleet.prefill else "decode"

    def _may_flip(self, fleet: Fleet, role: AnyRole) -> bool:
        other: Role = "decode" if role == "prefill" else "prefill"
        has_room = fleet.use_without(other, 1) < self._options.scale_down_below
        return has_room and bool(fleet.flexible.get(other))

    def _goes(
        self, picture: LoadPicture, capacity: Capacity | None, fleet: Fleet
    ) -> tuple[Role | None, int, str]:
        """Return the role of which workers leave, None if none may, their number, and why the rest would do;
        that is empty if it would not, or is unknown.

        By prediction it is the role of which the best ratio has fewer. If none of those may leave, it is the
        other role, if the remaining ratio has room as it is."""
        below = self._options.scale_down_below
        fewer = min(self._options.scale_down_by, fleet.num_workers - max(2, self._options.min_workers))
        none = (None, 0, "")
        if fewer < 1:
            return none
        if capacity is None:
            use, role = min((fleet.use_without(role, 1), role) for role in ROLES)
            if use >= below:
                return none
            while fleet.use_without(role, fewer) >= below:
                fewer -= 1
            room = f"without one of the {role} workers {use:.0%} of them would have been in use"
            spare = len(fleet.spare.get(role, ()))
            return role if spare else None, min(fewer, spare), room
        wanted, best = capacity.best(picture, fleet.num_workers - fewer)
        if best.worst >= below or not math.isfinite(best.worst):
            return none
        room = f"the load would have been {best.worst:.2f} with {fleet.num_workers - fewer} workers"
        first, second = ROLES if wanted < fleet.prefill else ROLES[::-1]
        if spare := len(fleet.spare.get(first, ())):
            return first, min(fewer, spare), room
        fewer = min(fewer, len(fleet.spare.get(second, ())))
        left = {role: fleet.count(role) - fewer * (role == second) for role in ROLES}
        has_room = fewer > 0 and capacity.pressure(picture, left["prefill"], left["decode"]).worst < below
        return second if has_room else None, fewer, room
