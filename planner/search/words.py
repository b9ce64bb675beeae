"""A plan in words that a person can act on."""

from __future__ import annotations

from collections import Counter

from ..simulator.slo import Seconds
from .goodput import LOWEST
from .plan import Plan
from .verdict import whether_to_disaggregate

BUSY = 0.5
"""Mean busy share below which a pool's requests wait in bursts only."""


def sentences(plan: Plan) -> list[str]:
    """The answer, then remarks."""
    return [*answer(plan), *(remarks(plan) if plan.winner.goodput > 0 else [])]


def answer(plan: Plan) -> list[str]:
    """What to build, what that serves, what limits it, what it costs, and what puts that in doubt."""
    winner, level = plan.winner, plan.question.level
    share = "" if level.bounds.levels else f" for {100 * level.attainment:g}% of the requests"
    asked = f"{level.bounds.words()}{share}"
    if winner.goodput <= 0:
        advice = "Loosen the bounds, take quicker hardware, or shorten what is asked."
        return [
            f"No way to divide {plan.goal.limits.gpus} GPUs meets {asked}{_at_rate(plan)}.",
            f"The best that was tried: {_closest(plan)}. {advice}",
        ]
    return [
        *_refused(plan),
        f"Recommended: {_workers(plan)}, {winner.candidate.options}.",
        f"Serves {_served(plan)} with {asked}.",
        f"Limited by {_limit(plan)}.",
        f"Costs {_costs(plan)}.",
        whether_to_disaggregate(plan),
        *_at_most(plan),
        *plan.warnings,
    ]


def _workers(plan: Plan) -> str:
    """Their numbers by role, with kinds where there are several."""
    counts = Counter[str]()
    for group in plan.winner.candidate.groups:
        counts[group.role] += group.count
    *others, last = (f"{num} {role}" for role, num in counts.items())
    numbers = " and ".join(filter(None, (", ".join(others), last)))
    plural = "s" if counts.total() > 1 else ""
    return f"{numbers} worker{plural} ({plan.question.hardware.words(plan.winner.candidate)})"


def _refused(plan: Plan) -> list[str]:
    """The requests that no cluster serves, which come first, and those that it serves in part."""
    longest, requests = plan.question.hardware.longest, plan.question.load.requests
    num = sum(r.num_prompt_tokens >= longest for r in requests)
    num_cut = sum(r.num_prompt_tokens + r.num_output_tokens > longest for r in requests) - num
    lines = []
    if num:
        lines.append(
            f"Refused at any rate: {num:,} of {len(requests):,} requests ({num / len(requests):.1%}), longer "
            f"than the model's {longest:,} tokens. No percentile below has them in it; no cluster changes "
            "that."
        )
    if num_cut:
        cut = f"Cut short: {num_cut:,} of {len(requests):,} answers"
        lines.append(f"{cut}, which end at the model's {longest:,} tokens.")
    return lines


def _served(plan: Plan) -> str:
    """The rate that is sustained."""
    if plan.whole is not None and plan.served == plan.whole[1]:
        whole = f"{plan.whole[0]:,} requests of the trace"
        return f"{about(plan, plan.served)} requests/s over {whole} (sketched)"
    if plan.sustained is not None:
        return f"{about(plan, plan.sustained)} requests/s for long (sketched)"
    gpus = plan.question.hardware.num_gpus(plan.winner.candidate)
    return f"{plan.served:.2f} requests/s ({plan.served / gpus:.3f} a GPU)"


def about(plan: Plan, rate: float) -> str:
    return f"about {rate:.2f}" if rate else f"less than {plan.winner.bound / LOWEST:.2g}"


def _limit(plan: Plan) -> str:
    """The bound that is nearest to being missed, and how busy workers are."""
    seen, level = plan.at_goodput, plan.question.level
    busy = ", ".join(f"{role} {share:.0%}" for role, share in seen.busy.items())
    workers = f"workers are busy: {busy}"
    if plan.winner.at_bound:
        return f"the workers' pace alone, by mean lengths; {workers}"
    if level.bounds.levels:
        levels = zip(level.bounds.levels, seen.tallies.missed, strict=True)
        worst, missed = max(levels, key=lambda each: each[0].weight * each[1])
        name, which = worst.words(), f"met by {1 - missed / seen.tallies.num_requests:.1%}"
    else:
        bounds = {name: bound for name in Seconds._fields if (bound := getattr(level.bounds, f"{name}_s"))}
        percent = 100 * level.attainment
        found = seen.tallies.percentiles((percent,))  # no TPOT where all answers have one token
        times = {name: found[name][f"p{percent:g}"] if name in found else 0.0 for name in bounds}
        name = max(times, key=lambda name: times[name] / bounds[name])
        which = f"p{percent:g} {1e3 * times[name]:,.0f} of {1e3 * bounds[name]:,.0f} ms"
    in_bursts = "; requests come in bursts" if max(seen.busy.values(), default=1.0) < BUSY else ""
    return f"{name if level.bounds.levels else name.upper()} ({which}); {workers}{in_bursts}"


def _costs(plan: Plan) -> str:
    """At the rate that it serves; energy at the eased one."""
    hardware, winner = plan.question.hardware, plan.winner
    price, watts = hardware.price_per_hour(winner.candidate), hardware.watts(winner.candidate)
    gpus = hardware.num_gpus(winner.candidate)
    # hours in which the winner generates a million tokens
    served = plan.served or winner.goodput
    hours = 1e6 / (3600 * served * plan.question.demand.output)
    parts = [f"{gpus} GPU{'s' if gpus > 1 else ''}, {gpus * hours:.2f} GPU hours a million output tokens"]
    if price is not None:
        parts.append(
            f"{price:.2f} an hour, {price * hours:.2f} a million output tokens, "
            f"{price / (3.6 * served):.4f} a thousand good requests"
        )
    if watts is not None and plan.energy_wh is not None:
        parts.append(f"up to {watts:,.0f} W, {plan.energy_wh:.3g} Wh a request at {plan.relaxed.rate:.2f}/s")
    return "; ".join(parts)


def _at_rate(plan: Plan) -> str:
    return ", at any rate" if plan.goal.objective == "goodput" else f" at {plan.goal.rate:.2f} requests/s"


def _at_most(plan: Plan) -> list[str]:
    """What the goodput means where not the cluster has ended the search for it, or the load was over before
    it could."""
    winner, lines = plan.winner, []
    if winner.at_bound and plan.goal.objective == "goodput":
        lines.append(
            f"These workers could keep up with {winner.goodput:.2f}/s for long by mean lengths, where the "
            "search ends: read that as `at most`. More requests, or tighter bounds, tell more."
        )
    if plan.sustained is not None:
        lasts_s = len(plan.question.load.requests) / winner.goodput
        lines.append(
            f"At {winner.goodput:.2f}/s, the most for the planned requests, they last {lasts_s:.1f} s and "
            f"one lives {plan.life_s:.1f} s: they are over before the cluster has filled. What is said of "
            "other clusters is as optimistic. Plan on more (--requests)."
        )
    return lines


def remarks(plan: Plan) -> list[str]:
    """What the profile does not know, and how much was tried."""
    lines = [
        f"Step times of {kind.name} are {kind.profile.source.partition(':')[0]}."
        for kind in plan.question.hardware.kinds
        if kind.profile.source.startswith("computed")
    ]
    if plan.if_slower is None:
        lines.append("By how much the profile is off it does not say.")
    if extrapolated := plan.at_goodput.extrapolated:
        steps = ", ".join(f"{what} {share:.1%}" for what, share in extrapolated.items())
        lines.append(f"Extrapolated steps: {steps}; profile further out.")
    lines.append("TPOT here is (last token - first token) / (tokens - 1). " + _effort(plan))
    if plan.question.level.bounds.levels:
        lines.append(
            f"Shares of good requests are of the level that is missed most, counted so that "
            f"{plan.question.level.attainment:.0%} keep it, whatever its percentile."
        )
    return lines


def _closest(plan: Plan) -> str:
    tried = [(attainment, rate, a.candidate) for a in plan.answers for rate, attainment in a.tried]
    if not tried:
        return "nothing came near enough to be bisected"
    attainment, rate, candidate = max(tried, key=lambda t: t[0])
    return (
        f"{plan.question.hardware.words(candidate)} at {rate:.3g} requests/s, where at most "
        f"{attainment:.1%} are good"
    )


def _effort(plan: Plan) -> str:
    load = plan.question.load
    off = [
        a.sketched / a.goodput - 1 for a in plan.answers if a.goodput > 0 and a.sketched > 0 and not a.pruned
    ]
    missed = off and plan.goal.objective == "goodput"
    sketch = f" (the sketch had missed their goodput by {min(off):+.0%} to {max(off):+.0%})" if missed else ""
    return (
        f"Planned on {len(load.requests):,} requests of the trace, which come at {load.rate:.2f}/s there; "
        f"{len(plan.sketches)} clusters at their best settings were sketched, {len(plan.answers)} "
        f"bisected{sketch}, {plan.num_simulated:,} requests simulated."
    )
