"""Which workers should change their roles, and whether there should be more or fewer. Pure; times in seconds
of a monotonic clock.

Once a second the latency model finds the best ratio for the present load. It is taken up only if

    the present ratio is loaded enough to matter,              act_above
    the other one is clearly better, and has been for a while, hysteresis, confirm_s; undo_s for the way back
    the gain soon outweighs the cost of the flips,             flip_cost_s, gain_over_s
    and the last flips are over and have had time to show.     settle_s

Mixed workers have both roles, change neither, and take work from either: the model does not know the worth of
a ratio beside them. Where there are any, or were lately, roles stay as they are, and workers come and go by
the rules that need no model (``Scaling``). Without a model at all these rules change roles too.

The model may be wrong. A change is taken back if, under the same load, fewer requests than before meet the
objective of the role that lost workers; the controller then changes nothing for a while, longer each time.
(The other objective may be missed for long because of the queue from before the change.)
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

SAME_LOAD = 0.35  # relative difference of the mix up to which two pictures are of one load
WORSE = 0.1  # of attainment
MAX_HOLD_S = 1800.0


@dataclass(frozen=True, slots=True)
class _Trial:
    """Flips under observation."""

    at: float
    before: LoadPicture
    prefill: int  # workers before


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
        self._better_since: float | None = None
        self._favoured = 0  # prefill workers, of the ratio that has been better since then
        self._quiet_until = -math.inf
        self._last_flip: tuple[float, Role] | None = None  # time and role of the last change
        self._proposal: _Proposal | None = None
        self._trial: _Trial | None = None
        self._hold_s = options.hold_s
        self.state = "nothing looked at yet"
        """The newest action, or why there is none, as a sentence."""
        self.pressure: Pressure | None = None
        self.picture: LoadPicture | None = None
        self.decisions: deque[Decision] = deque(maxlen=100)
        self._mixed_at = -math.inf  # when there last were mixed workers
        self._holds_for_mixed = False
        self.wanted: dict[AnyRole, int] = {}
        """Workers of each role: the present number, or one more or fewer as long as that is wanted."""

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
        self.pressure = self._capacity = self._trial = None
        if not fleet.mixed:
            why = (
                f"there was a mixed worker {now - self._mixed_at:.0f} s ago, which may come back: "
                "roles stay as they are"
            )
        elif fleet.mixed == fleet.num_workers:
            why = f"all {fleet.mixed} workers are mixed: there are no roles to change"
        else:
            who = f"{fleet.mixed} of {fleet.num_workers} workers are mixed"
            why = (
                f"{who}, and what the others' ratio is worth beside those is not predicted: roles stay "
                "as they are"
            )
        self._rest(why)
        return [] if self._holds_for_mixed else [Decision(now, "hold", "", "mixed", why)]

    def _flips(self, picture: LoadPicture, fleet: Fleet, now: float) -> list[Decision]:
        self.pressure = None
        if self._capacity is None:
            return self._rest("there is no latency model to predict with: workers change by rules")
        if not fleet.prefill or not fleet.decode:
            return self._rest("a role has no worker")
        if fleet.changing or now < self._quiet_until:
            self._better_since = None
            self.state = "a change is under way, or has not had time to show"
            return []
        if picture.num_requests < MIN_JUDGED:
            return self._rest(f"only {picture.num_requests} requests to judge by")
        present = self._capacity.pressure(picture, fleet.prefill, fleet.decode)
        if not math.isfinite(present.worst):
            return self._rest("the latency model does not cover this load")
        self.pressure = present
        if (back := self._regret(picture, fleet, now)) is not None:
            return back
        return self._improve(picture, fleet, present, now)

    def _improve(self, picture: LoadPicture, fleet: Fleet, present: Pressure, now: float) -> list[Decision]:
        options, capacity = self._options, self._capacity
        assert capacity is not None
        prefill, best = self._reachable(picture, fleet)
        count = abs(prefill - fleet.prefill)
        suffers = picture.num_judged >= MIN_JUDGED and picture.attainment < options.attainment
        if not count:
            return self._rest(self._why_it_stays(picture, fleet, present))
        if present.worst < options.act_above and not suffers:
            return self._rest(f"the load is {present.worst:.2f}: there is room")
        if best.worst > present.worst * (
            1 - self._hysteresis("prefill" if prefill > fleet.prefill else "decode", now)
        ):
            return self._rest(f"{prefill}P:{fleet.num_workers - prefill}D would be hardly better")
        gain_s = fleet.num_workers * min(1.0, 1 - best.worst / present.worst) * options.gain_over_s
        if gain_s < count * options.flip_cost_s:
            return self._rest(f"{count} flips would cost more than they bring")
        if self._better_since is None or (prefill > fleet.prefill) != (self._favoured > fleet.prefill):
            self._better_since, self._favoured = now, prefill
        if now - self._better_since < options.confirm_s:
            self.state = (
                f"{prefill}P:{fleet.num_workers - prefill}D seems better; waiting whether it stays so"
            )
            return []
        if self._proposal is not None and self._proposal.still_holds(
            fleet.prefill, prefill, now - options.repeat_s
        ):
            self.state = (
                f"{prefill}P:{fleet.num_workers - prefill}D would be better; it was proposed, and has not "
                "been done"
            )
            return []
        reason = (
            f"load {present.prefill:.2f} on prefill and {present.decode:.2f} on decode with "
            f"{fleet.prefill}P:{fleet.decode}D; {prefill}P:{fleet.num_workers - prefill}D makes it "
            f"{best.prefill:.2f} and {best.decode:.2f} ({picture.rate:.1f} requests/s of "
            f"{picture.new_tokens:.0f} new and {picture.output_tokens:.0f} output tokens, "
            f"{picture.num_waiting} waiting, {picture.attainment:.0%} good)"
        )
        self._trial = _Trial(now, picture, fleet.prefill)
        self._proposal = _Proposal(now, fleet.prefill, prefill)
        return self._flip(fleet, prefill, reason, now)

    def _why_it_stays(self, picture: LoadPicture, fleet: Fleet, present: Pressure) -> str:
        assert self._capacity is not None
        prefill, best = self._capacity.best(picture, fleet.num_workers)
        if present.worst < self._options.act_above or best.worst > present.worst * (
            1 - self._options.hysteresis
        ):
            return f"{fleet.prefill}P:{fleet.decode}D is the best ratio"
        return (
            f"{prefill}P:{fleet.num_workers - prefill}D would make the load {best.worst:.2f} "
            f"instead of {present.worst:.2f}, but no worker "
            "there is that can change its role: start them as `splitserve worker`"
        )

    def _hysteresis(self, role: Role, now: float) -> float:
        """Return the least gain; twice as much on the way back."""
        options, last = self._options, self._last_flip
        returns = last is not None and last[1] != role and now - last[0] < options.undo_s
        return (2 if returns else 1) * options.hysteresis

    def _reachable(self, picture: LoadPicture, fleet: Fleet) -> tuple[int, Pressure]:
        """Return the best ratio that the flexible workers allow."""
        assert self._capacity is not None
        low = max(1, fleet.prefill - len(fleet.flexible.get("prefill", ())))
        high = min(fleet.num_workers - 1, fleet.prefill + len(fleet.flexible.get("decode", ())))
        found = self._capacity.pressures(picture, range(low, high + 1), fleet.num_workers)
        return min(found, key=lambda each: (each[1].worst, abs(each[0] - fleet.prefill)))

    def _regret(self, picture: LoadPicture, fleet: Fleet, now: float) -> list[Decision] | None:
        """Take back a change that made things worse. Return None if there is none."""
        trial = self._trial
        if trial is None or now - trial.at < self._options.regret_s:
            return None
        self._trial = None
        if fleet.prefill == trial.prefill:
            return None  # it was not carried out
        objective, before, after = ("TPOT", trial.before.in_pace, picture.in_pace)
        if fleet.prefill < trial.prefill:
            objective, before, after = ("TTFT", trial.before.in_time, picture.in_time)
        if (
            picture.num_judged < MIN_JUDGED
            or after >= before - WORSE
            or not _same_load(picture, trial.before)
        ):
            self._hold_s = self._options.hold_s
            return None
        reason = (
            f"{after:.0%} of requests make their {objective} where {before:.0%} did, under the same load: "
            f"back to {trial.prefill} prefill workers, and nothing more for {self._hold_s:.0f} s; "
            "is the profile of these workers?"
        )
        back = self._flip(fleet, trial.prefill, reason, now)
        self._quiet_until = now + self._hold_s
        self._hold_s = min(2 * self._hold_s, MAX_HOLD_S)
        return back

    def _flip(self, fleet: Fleet, prefill: int, reason: str, now: float) -> list[Decision]:
        role: Role = "prefill" if prefill > fleet.prefill else "decode"
        other: Role = "decode" if role == "prefill" else "prefill"
        names = fleet.flexible.get(other, [])[: abs(prefill - fleet.prefill)]
        self._quiet_until, self._better_since = now + self._options.settle_s, None
        self.state, self._last_flip = reason, (now, role)
        return [Decision(now, "flip", name, role, reason) for name in names]

    def _by_rule(self, kind: Kind, role: AnyRole, reason: str, fleet: Fleet, now: float) -> list[Decision]:
        """Return the decisions of a rule."""
        if kind == "flip":
            return self._flip(fleet, fleet.prefill + (1 if role == "prefill" else -1), reason, now)
        change = self._scaling.change
        going = fleet.spare.get(role, [])[:-change] if change < 0 and role != "mixed" else [""] * change
        return [Decision(now, kind, name, role, reason) for name in going]

    def _rest(self, why: str) -> list[Decision]:
        self._better_since, self.state = None, why
        return []


def _same_load(a: LoadPicture, b: LoadPicture) -> bool:
    pairs = ((a.rate, b.rate), (a.new_tokens, b.new_tokens), (a.output_tokens, b.output_tokens))
    return all(abs(x - y) <= SAME_LOAD * max(x, y) for x, y in pairs)
