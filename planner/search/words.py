"""A plan in words that a person can act on."""

from __future__ import annotations

from collections.abc import Callable

from ..simulator.report import slo_words
from .goodput import LOWEST, Answer
from .look import Look
from .plan import GROWTH, Plan

NEARLY_AS_GOOD = 0.95


def sentences(plan: Plan) -> list[str]:
    """The recommendation, one thought a line."""
    winner, level = plan.winner, plan.question.level
    asked = f"{slo_words(level.bounds)} for {level.attainment:.0%} of the requests"
    if winner.goodput <= 0:
        return [
            f"No way to divide {plan.goal.limits.gpus} GPUs meets {asked}{_at_rate(plan)}.",
            (
                f"The best that was tried: {_closest(plan)}. Loosen the bounds, take quicker hardware, "
                "or shorten what is asked."
            ),
        ]
    gpus = plan.question.hardware.num_gpus(winner.candidate)
    lines = [
        f"Recommended: {plan.question.hardware.words(winner.candidate)}, {_options(winner)}.",
        (
            f"It serves {winner.goodput:.2f} requests/s ({winner.goodput / gpus:.3f} a GPU) with "
            f"{asked}.{_spread(plan)}{_if_slower(plan)}"
        ),
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
        f"Extrapolated: {what} in {share:.1%} of the steps; profile further out."
        for what, share in extrapolated
    ]
    lines.append("TPOT here is (last token - first token) / (tokens - 1). " + _effort(plan))
    return lines + plan.warnings


def _at_rate(plan: Plan) -> str:
    return ", at any rate" if plan.goal.objective == "goodput" else f" at {plan.goal.rate:.2f} requests/s"


def _options(one: Answer) -> str:
    c = one.candidate
    mover = f", KV blocks by {c.mover}" if c.mover else ""
    return f"steps of {c.max_batch_tokens} prompt tokens, batches of {c.max_num_seqs}{mover}"


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
    return f" {how}: {least} to {max(known):.2f} (that is chance alone)."


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
        f"{', of '.join(known)}): {least}."
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
        lasts_s, least = len(plan.question.load.requests) / winner.goodput, winner.bound / LOWEST
        for_long = f"about {plan.sustained:.2f}" if plan.sustained > 0 else f"less than {least:.2f}"
        lines.append(
            f"At that rate these requests last {lasts_s:.1f} s, and one lives {plan.life_s:.1f} s: they are "
            f"over before the cluster has filled. If they came over and over it would serve {for_long} "
            "requests/s (sketched); what follows about others is as optimistic. Plan on more "
            "(--requests)."
        )
    return lines


def _costs(plan: Plan) -> list[str]:
    hardware, winner = plan.question.hardware, plan.winner
    lines = []
    price, watts = hardware.price_per_hour(winner.candidate), hardware.watts(winner.candidate)
    if price is not None:
        lines.append(
            f"That is {price:.2f} an hour, {price / (3.6 * winner.goodput):.4f} a thousand good "
            "requests at that rate."
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
        now = f"only {growth.unchanged:.1%} would be good"
    elif winner.bound < rate:
        now = (
            f"{growth.unchanged:.1%} of this load would be good still, but these workers keep up with "
            f"{winner.bound:.2f} for long"
        )
    elif plan.goal.objective == "goodput":
        return (
            f"{grown} {growth.unchanged:.1%} would be good again: so short a load cannot tell more, "
            "plan on more requests."
        )
    else:
        return f"{grown} {growth.unchanged:.1%} would be good still: nothing has to change."
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
        return "nothing came near enough to be simulated"
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
        f"simulated{sketch}: {plan.num_simulated:,} requests."
    )


# --- whether to disaggregate at all ---------------------------------------------------------------


def whether_to_disaggregate(plan: Plan) -> str:
    """One sentence. Both sides are in it, but the one that is recommended."""
    sides = [
        ("purely split", plan.split, ""),
        ("the same GPUs colocated with chunked prefill", plan.colocated, " in turn with steps of sequences"),
    ]
    others = [f"{name}{_described(plan, one, turns)}" for name, one, turns in sides if one is not plan.winner]
    return f"{_verdict(plan)}: {'; '.join(others)}."


def _verdict(plan: Plan) -> str:
    if plan.is_at_most(plan.best) and plan.is_at_most(plan.colocated):
        return "Whether to disaggregate this load does not tell"
    if not plan.disaggregates:
        return "Do not disaggregate"
    if plan.goal.objective == "goodput" and plan.colocated.goodput > NEARLY_AS_GOOD * plan.best.goodput:
        return "Disaggregating gains little"
    return "Disaggregate" if plan.winner is plan.split else "Disaggregate in part"


def _described(plan: Plan, one: Answer, turns: str) -> str:
    c = one.candidate
    if not c.num_workers:
        return ": cannot be built"
    what = f", {plan.question.hardware.words(c)}, steps of {c.max_batch_tokens} prompt tokens{turns}"
    return f"{what}: {compared(plan, one)}"


def compared(plan: Plan, one: Answer) -> str:
    """What another cluster would do, in the goal's units, and by how much that is more or less than the
    recommended one."""
    if one.goodput <= 0:
        lowest = min((rate for rate, _ in one.tried), default=0.0)
        return (
            f"not good enough at {lowest:.2f} requests/s, the lowest rate tried" if one.tried else "not tried"
        )
    if plan.goal.objective != "goodput" and one.goodput < plan.goal.rate:
        return f"serves {one.goodput:.2f} requests/s only"
    ours, theirs = abs(plan.value(plan.winner)), abs(plan.value(one))
    at_most = "at most " if plan.is_at_most(one) else ""
    unit = {"goodput": "requests/s", "cost": "an hour", "energy": "Wh a request"}[plan.goal.objective]
    return f"{at_most}{theirs:.2f} {unit} ({theirs / ours - 1:+.0%})"
