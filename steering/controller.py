"""Which workers should change their roles, and whether there should be more or fewer. Pure; times in seconds
of a monotonic clock.

The ratio is that which ``VirtualFleets`` thinks best, once the last flips are over and have had time to show.

Mixed workers have both roles, change neither, and take work from either: the model does not know the worth of
a ratio beside them. Where there are any, or were lately, roles stay as they are, and workers come and go by
the rules that need no model (``Scaling``). Without a model at all these rules change roles too.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import astuple, dataclass

from ..engine.latency_profile import Profile
from ..transport.messages.messages import Role
from .capacity import Capacity, Pressure
from .fleet import AnyRole, Decision, Fleet, Kind
from .load_watch import MIN_JUDGED, LoadPicture
from .options import SteeringOptions
from .scaling import Scaling
from .virtual_fleets import Size, VirtualFleets


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A decided change, in prefill workers."""

    at: float
    before: int
    wanted: int

    def still_holds(self, present: int, wanted: int, since: float) -> bool:
        """Whether it has not been carried out, and much the same is wanted again soon after it."""
        return self.at > since and present == self.before and (wanted > present) == (self.wanted > present)


class PoolController:
    """Decides once a second. ``profile``: the workers' latency model; without one, by rules alone."""

    def __init__(self, options: SteeringOptions, profile: Profile | None) -> None:
        self._options, self._profile = options, profile
        self._capacity: Capacity | None = None
        self._scaling = Scaling(options)
        self._virtual = VirtualFleets(options)
        self._sizes: dict[int, Size] = {}  # when no change was under way
        self._quiet_until = -math.inf
        self._proposal: _Proposal | None = None
        self.state = "nothing looked at yet"
        """The newest action, or why there is none, as a sentence."""
        self.pressure: Pressure | None = None
        self.picture: LoadPicture | None = None
        self.decisions: deque[Decision] = deque(maxlen=100)
        self._mixed_at = -math.inf  # when there last were mixed workers
        self._holds_for_mixed = False
        self.wanted: dict[AnyRole, int] = {}
        """Workers of each role: the present number, or one more or fewer as long as that is wanted."""

    @property
    def lends_decode(self) -> bool:
        """Whether decode workers may borrow prompts: not while their own load is too high."""
        return self.pressure is None or self.pressure.decode <= 1

    def decide(self, picture: LoadPicture, fleet: Fleet, now: float) -> list[Decision]:
        """Return the decisions of this second; they are in ``decisions`` already."""
        self.picture = picture
        if self._profile is not None:
            self._capacity = Capacity(
                self._profile, self._options, fleet.max_batch_tokens, fleet.max_num_seqs
            )
        if not all(map(math.isfinite, astuple(picture))):
            return self._rest("the load is not known: one of its numbers is none")
        self._mixed_at = now if fleet.mixed else self._mixed_at
        holds = now - self._mixed_at < self._options.mixed_again_s
        found = self._hold(fleet, now) if holds else self._flips(picture, fleet, now)
        self._holds_for_mixed = holds
        if not found and not fleet.changing:
            scaled = self._scaling.decide(picture, self._capacity, fleet, now, holds=holds)
            found = [] if scaled is None else self._by_rule(*scaled, fleet, now)
            self.wanted = {"prefill": fleet.prefill, "decode": fleet.decode}
            if fleet.mixed:
                self.wanted["mixed"] = fleet.mixed
            self.wanted[self._scaling.role] = self.wanted.get(self._scaling.role, 0) + self._scaling.change
        self.decisions += found
        return found

    def _hold(self, fleet: Fleet, now: float) -> list[Decision]:
        """Change no role while there are mixed workers, or were lately: a mixed worker that is started again
        needs the roles that fit beside it."""
        self.pressure = self._capacity = None
        if not fleet.mixed:
            why = (
                f"there was a mixed worker {now - self._mixed_at:.0f} s ago, which may come back: "
                "roles stay as they are"
            )
        elif fleet.mixed == fleet.num_workers:
            why = f"all {fleet.mixed} workers are mixed: there are no roles to change"
        else:
            why = (
                f"{fleet.mixed} of {fleet.num_workers} workers are mixed, and what the others' ratio is "
                "worth beside those is not predicted: roles stay as they are"
            )
        self._rest(why)
        return [] if self._holds_for_mixed else [Decision(now, "hold", "", "mixed", why)]

    def _flips(self, picture: LoadPicture, fleet: Fleet, now: float) -> list[Decision]:
        self.pressure = None
        if self._capacity is None:
            return self._rest("there is no latency model to predict with: workers change by rules")
        if not fleet.prefill or not fleet.decode:
            return self._rest("a role has no worker")
        self._sizes = self._sizes if fleet.changing and fleet.prefill in self._sizes else fleet.sizes()
        self._virtual.serve(picture, self._capacity, self._sizes, fleet.prefill)
        present = self._capacity.pressure(picture, *fleet.size)
        self.pressure = present if math.isfinite(present.worst) else None
        if fleet.changing or now < self._quiet_until:
            self.state = "a change is under way, or has not had time to show"
            return []
        if picture.num_requests < MIN_JUDGED:
            return self._rest(f"only {picture.num_requests} requests to judge by")
        if self.pressure is None:
            return self._rest("the latency model does not cover this load")
        return self._improve(picture, fleet, present, now)

    def _improve(self, picture: LoadPicture, fleet: Fleet, present: Pressure, now: float) -> list[Decision]:
        virtual, here = self._virtual, f"{fleet.prefill}P:{fleet.decode}D"
        low = max(1, fleet.prefill - len(fleet.flexible.get("prefill", ())))
        high = min(fleet.num_workers - 1, fleet.prefill + len(fleet.flexible.get("decode", ())))
        prefill = virtual.best(range(low, high + 1))
        there = f"{prefill}P:{fleet.num_workers - prefill}D"
        if prefill == fleet.prefill:
            if (best := virtual.best(range(1, fleet.num_workers))) == prefill:
                return self._rest(f"{picture.attainment:.0%} of requests are good: {here} stays")
            return self._rest(
                f"{best}P:{fleet.num_workers - best}D would be better, but no worker "
                "there is that can change its role: start them as `splitserve worker`"
            )
        if picture.attainment >= self._options.attainment and present.worst < 1:
            return self._rest(
                f"{picture.attainment:.0%} of requests are good and the load fits: {here} stays"
            )
        if self._proposal is not None and self._proposal.still_holds(
            fleet.prefill, prefill, now - self._options.repeat_s
        ):
            self.state = f"{there} would be better; it was proposed, and has not been done"
            return []
        reason = (
            f"{picture.attainment:.0%} of requests are good, load {present.prefill:.2f} on prefill and "
            f"{present.decode:.2f} on decode with {here}: {there} loses fewer "
            f"({picture.rate:.1f} requests/s of {picture.new_tokens:.0f} new and "
            f"{picture.output_tokens:.0f} output tokens, {picture.num_waiting} waiting)"
        )
        self._proposal = _Proposal(now, fleet.prefill, prefill)
        return self._flip(fleet, prefill, reason, now)

    def _flip(self, fleet: Fleet, prefill: int, reason: str, now: float) -> list[Decision]:
        role: Role = "prefill" if prefill > fleet.prefill else "decode"
        other: Role = "decode" if role == "prefill" else "prefill"
        names = fleet.flexible.get(other, [])[: abs(prefill - fleet.prefill)]
        self._quiet_until, self.state = now + self._options.settle_s, reason
        return [Decision(now, "flip", name, role, reason) for name in names]

    def _by_rule(self, kind: Kind, role: AnyRole, reason: str, fleet: Fleet, now: float) -> list[Decision]:
        """Return the decisions of a rule."""
        if kind == "flip":
            return self._flip(fleet, fleet.prefill + (1 if role == "prefill" else -1), reason, now)
        change = self._scaling.change
        going = fleet.spare.get(role, [])[:-change] if change < 0 and role != "mixed" else [""] * change
        return [Decision(now, kind, name, role, reason) for name in going]

    def _rest(self, why: str) -> list[Decision]:
        self.state = why
        return []
