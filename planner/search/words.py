"""A plan in words that a person can act on."""

from __future__ import annotations

from collections.abc import Callable

from .goodput import LOWEST
from .looks import Look
from .plan import GROWTH, Plan
from .verdict import compared, whether_to_disaggregate


def sentences(plan: Plan) -> list[str]:
    """The recommendation, one thought a line."""
    winner, level = plan.winner, plan.question.level
    share = "" if level.bounds.levels else f" for {level.attainment:.0%} of the requests"
    asked = f"{level.bounds.words()}{share}"
    if winner.goodput <= 0:
        return [
            f"No way to divide {plan.goal.limits.gpus} GPUs meets {asked}{_at_rate(plan)}.",
            (
                f"The best that was tried: {_closest(plan)}. Loosen the bounds, take quicker hardware, "
                "or shorten what is asked."
            ),
        ]
    lines = [
        *_refused(plan),
        f"Recommended: {plan.question.hardware.words(winner.candidate)}, {winner.candidate.options}.",
        _served(plan, asked),
        *_at_most(plan),
        *_costs(plan),
        f"At that rate: {_latencies(plan)}; busy: {_busy(plan.at_goodput)}.",
        (
            f"At {plan.relaxed.rate:.2f} requests/s: {_plain_latencies(plan.relaxed)}; "
            f"{plan.relaxed.tallies.attainment:.1%} are good."
        ),
    ]
    lines += [f"Neighbour {a.candidate.ratio}: {compared(plan, a)}." for a in plan.neighbours]
    lines += _mixed(plan)
    lines.append(whether_to_disaggregate(plan))
    lines.append(_growth(plan))
    means = plan.means
    lines.append(
        "A plan from mean lengths and service times would build "
        f"{plan.question.hardware.words(means.candidate)} and expect {means.expected:.2f} requests/s; "
        f"simulated at that rate, {means.attainment:.1%} of the requests are good."
    )
    extrapolated = plan.at_goodput.extrapolated.items()
    lines += [
        f"Step times of {kind.name} are {kind.profile.source.partition(':')[0]}."
        for kind in plan.question.hardware.kinds
        if kind.profile.source.startswith("computed")
    ]
    lines += [
        f"Extrapolated: {what} in {share:.1%} of the steps; profile further out."
        for what, share in extrapolated
    ]
    lines.append("TPOT here is (last token - first token) / (tokens - 1). " + _effort(plan))
    if level.bounds.levels:
        lines.append(
            f"Shares of good requests are of the level that is missed most, counted so that "
            f"{level.attainment:.0%} keep it, whatever its percentile."
        )
    return lines + plan.warnings


def _refused(plan: Plan) -> list[str]:
    """The requests that no cluster serves, which come first."""
    longest = max(kind.profile.memory.max_model_len for kind in plan.question.hardware.kinds)
    requests = plan.question.load.requests
    num = sum(r.num_prompt_tokens >= longest for r in requests)
    if not num:
        return []
    return [
        f"Refused at any rate: {num:,} of {len(requests):,} requests ({num / len(requests):.1%}), longer "
        f"than the model's {longest:,} tokens. No percentile below has them in it; no cluster changes that."
    ]


def _served(plan: Plan, asked: str) -> str:
    """The rate that is sustained, and its range."""
    rate = plan.winner.goodput
    if plan.whole is not None and plan.served == plan.whole[1]:
        lead = (
            f"It serves about {plan.served:.2f} requests/s over {plan.whole[0]:,} requests of the trace "
            f"(sketched) with {asked}; the planned part alone, {rate:.2f}."
        )
    elif plan.sustained is not None:
        lead = (
            f"It serves {_for_long(plan)} requests/s for long (sketched) with {asked}; "
            f"these alone, {rate:.2f}."
        )
    else:
        gpus = plan.question.hardware.num_gpus(plan.winner.candidate)
        hours = gpus * _hours_a_million(plan)
        lead = (
            f"It serves {rate:.2f} requests/s ({rate / gpus:.3f} a GPU; {hours:.2f} GPU hours a million "
            f"output tokens) with {asked}."
        )
    return f"{lead}{_spread(plan)}{_if_slower(plan)}"


def _for_long(plan: Plan) -> str:
    return f"about {plan.sustained:.2f}" if plan.sustained else f"less than {plan.winner.bound / LOWEST:.2f}"


def _hours_a_million(plan: Plan) -> float:
    """Hours in which the winner generates a million tokens at its goodput."""
    return 1e6 / (3600 * plan.winner.goodput * plan.question.demand.output)


def _at_rate(plan: Plan) -> str:
    return ", at any rate" if plan.goal.objective == "goodput" else f" at {plan.goal.rate:.2f} requests/s"


def _spread(plan: Plan) -> str:
    if not plan.others:
        return ""
    known = [plan.winner.goodput, *(goodput for goodput, _ in plan.others)]
    how = (
        "Each half of the load by itself"
        if plan.question.load.is_tied
        else "The same lengths in other orders"
    )
    least = f"{min(known):.2f}" if min(known) > 0 else f"less than {plan.winner.bound / LOWEST:.2f}"
    return f" {how}: {least} to {max(known):.2f} (that is chance alone, sketched)."


def _if_slower(plan: Plan) -> str:
    """What errors of the profile would make of the goodput."""
    if plan.if_slower is None:
        return " By how much the profile is off it does not say."
    errors = plan.question.hardware.fit_errors(plan.winner.candidate)
    known = [
        f"{what} {error:.1%}"
        for what, error in zip(("prompts", "sequences"), errors, strict=True)
        if error is not None
    ]
    least = f"{plan.if_slower:.2f}" if plan.if_slower > 0 else f"less than {plan.winner.bound / LOWEST:.2f}"
    return (
        " If every step took longer by what the profile's fit is off on average (of "
        f"{', of '.join(known)}): {least} (sketched)."
    )


def _at_most(plan: Plan) -> list[str]:
    """What the goodput means where not the cluster has ended the search for it, or the load was over before
    it could."""
    winner, lines = plan.winner, []
    if winner.at_bound and plan.goal.objective == "goodput":
        lines.append(
            "That is what these workers could keep up with for long, by mean lengths. This load met the "
            "bounds up to there, so the search ended there: read it as `at most`, and plan on more "
            "requests, or on tighter bounds, to tell more."
        )
    if plan.sustained is not None:
        lasts_s = len(plan.question.load.requests) / winner.goodput
        lines.append(
            f"At that rate these requests last {lasts_s:.1f} s, and one lives {plan.life_s:.1f} s: they are "
            "over before the cluster has filled. If they came over and over it would serve "
            f"{_for_long(plan)} requests/s (sketched); what follows about others is as optimistic. Plan on "
            "more (--requests)."
        )
    return lines


def _costs(plan: Plan) -> list[str]:
    hardware, winner = plan.question.hardware, plan.winner
    lines = []
    price, watts = hardware.price_per_hour(winner.candidate), hardware.watts(winner.candidate)
    if price is not None:
        lines.append(
            f"That is {price:.2f} an hour, {price / (3.6 * winner.goodput):.4f} a thousand good "
            f"requests at that rate, {price * _hours_a_million(plan):.2f} a million output tokens."
        )
    if watts is not None and plan.energy_wh is not None:
        lines.append(
            f"It draws up to {watts:,.0f} W; at {plan.relaxed.rate:.2f} requests/s about "
            f"{plan.energy_wh:.2f} Wh a request."
        )
    return lines


def _latencies(plan: Plan) -> str:
    """Percentiles at the goodput, with the range over the other orders in brackets."""
    looks = [plan.at_goodput, *(seen for _, seen in plan.others)]
    return _of_each(
        lambda name, p: _range([1e3 * seen.tallies.percentiles()[name][p] for seen in looks]), plan.at_goodput
    )


def _plain_latencies(seen: Look) -> str:
    of = seen.tallies.percentiles()
    return _of_each(lambda name, p: f"{1e3 * of[name][p]:.0f}", seen)


def _of_each(words: Callable[[str, str], str], seen: Look) -> str:
    of, percents = seen.tallies.percentiles(), ("p50", "p90", "p99")
    names = [name for name in ("ttft", "tpot", "e2e") if name in of]
    return "; ".join(
        f"{name.upper()} " + ", ".join(f"{p} {words(name, p)}" for p in percents) + " ms" for name in names
    )


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{values[0]:.0f}" if high - low < 1 else f"{values[0]:.0f} ({low:.0f} to {high:.0f})"


def _busy(seen: Look) -> str:
    return ", ".join(f"{role} {share:.0%}" for role, share in seen.busy.items())


def _mixed(plan: Plan) -> list[str]:
    """What a share of colocated workers beside the split would do, where it was simulated and did not win."""
    mixed = [
        a
        for a in plan.answers
        if a.candidate.prefill and a.candidate.colocated and not a.pruned and a.goodput > 0
    ]
    best = max(mixed, key=lambda a: a.goodput, default=None)
    if best is None or best is plan.winner or best in plan.neighbours:
        return []
    return [f"Partly colocated, {best.candidate.ratio}: {compared(plan, best)}."]


def _growth(plan: Plan) -> str:
    growth, winner, words = plan.growth, plan.winner, plan.question.hardware.words
    rate = GROWTH * (winner.goodput if plan.goal.objective == "goodput" else plan.goal.rate)
    grown = f"When load grows by {GROWTH - 1:.0%}, to {rate:.2f} requests/s,"
    if growth.unchanged < plan.question.level.attainment:
        now = f"only about {growth.unchanged:.0%} would be good"
    elif winner.bound < rate:
        now = (
            f"about {growth.unchanged:.0%} of this load would be good still, but these workers keep up with "
            f"{winner.bound:.2f} for long"
        )
    elif plan.goal.objective == "goodput":
        return (
            f"{grown} about {growth.unchanged:.0%} would be good again: so short a load cannot tell more, "
            "plan on more requests."
        )
    else:
        return f"{grown} about {growth.unchanged:.0%} would be good still: nothing has to change."
    more = plan.question.hardware.num_gpus(growth.candidate) - plan.question.hardware.num_gpus(
        winner.candidate
    )
    holds = f"then {growth.attainment:.1%} are good"
    if growth.attainment < plan.question.level.attainment:
        holds = f"which is still not enough ({growth.attainment:.1%}): plan again with more GPUs"
    return f"{grown} {now}; go to {words(growth.candidate)} ({more} GPUs more): {holds}."


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
