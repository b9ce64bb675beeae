"""A plan in words that a person can act on."""

from __future__ import annotations

from collections.abc import Callable

from ..simulator.report import slo_words
from .goodput import Answer
from .looks import Look
from .plan import GROWTH, Plan


def sentences(plan: Plan) -> list[str]:
    """The recommendation, one thought a line."""
    winner, level = plan.winner, plan.question.level
    asked = f"{slo_words(level.bounds)} for {level.attainment:.0%} of the requests"
    if winner.goodput <= 0:
        return [
            f"No way to divide {plan.goal.limits.gpus} GPUs meets {asked}{_at_rate(plan)}.",
            f"The best that was tried: {_closest(plan)}. Loosen the bounds, take quicker hardware, or shorten what is asked.",
        ]
    gpus = plan.question.hardware.num_gpus(winner.candidate)
    said = [
        f"Recommended: {plan.question.hardware.words(winner.candidate)}, {_options(winner)}.",
        f"It serves {winner.goodput:.2f} requests/s ({winner.goodput / gpus:.3f} a GPU) with {asked}.{_spread(plan)}",
        *_costs(plan),
        f"At that rate: {_latencies(plan)}; busy: {_busy(plan.at_goodput)}.",
        f"At {plan.relaxed.rate:.2f} requests/s: {_plain_latencies(plan.relaxed)}; {plan.relaxed.tallies.attainment:.1%} are good.",
    ]
    said += [f"Neighbour {a.candidate.ratio}: {_compared(a, winner.goodput)}." for a in plan.neighbours]
    said += _mixed(plan)
    said.append(_disaggregate(plan))
    said.append(_growth(plan))
    means = plan.means
    said.append(
        f"A plan from mean lengths and service times would build {plan.question.hardware.words(means.candidate)} and expect "
        f"{means.expected:.2f} requests/s; simulated at that rate, {means.attainment:.1%} of the requests are good."
    )
    said += _short(plan)
    extrapolated = plan.at_goodput.extrapolated.items()
    said += [f"Extrapolated: {what} in {share:.1%} of the steps; profile further out." for what, share in extrapolated]
    said.append("TPOT here is (last token - first token) / (tokens - 1). " + _effort(plan))
    return said


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
    how = "Each half of the load by itself" if plan.question.load.is_tied else "The same lengths in other orders"
    return f" {how}: {min(known):.2f} to {max(known):.2f}."


def _short(plan: Plan) -> list[str]:
    """A warning where the load is over before the cluster has filled."""
    lasts_s, life_s = len(plan.question.load.requests) / plan.at_goodput.rate, plan.at_goodput.tallies.percentiles()["e2e"]["mean"]
    if lasts_s > 4 * life_s:
        return []
    return [f"At that rate these requests last {lasts_s:.0f} s, and one lives {life_s:.1f} s: too optimistic; plan on more (--requests)."]


def _costs(plan: Plan) -> list[str]:
    hardware, winner = plan.question.hardware, plan.winner
    said = []
    price, watts = hardware.price_per_hour(winner.candidate), hardware.watts(winner.candidate)
    if price is not None:
        said.append(f"That is {price:.2f} an hour, {price / (3.6 * winner.goodput):.4f} a thousand good requests at that rate.")
    if watts is not None and plan.energy_wh is not None:
        said.append(f"It draws up to {watts:,.0f} W; at {plan.relaxed.rate:.2f} requests/s about {plan.energy_wh:.2f} Wh a request.")
    return said


def _latencies(plan: Plan) -> str:
    """Percentiles at the goodput, with the range over the other orders in brackets."""
    looks = [plan.at_goodput, *(seen for _, seen in plan.others)]
    return _of_each(lambda name, p: _range([1e3 * seen.tallies.percentiles()[name][p] for seen in looks]), plan.at_goodput)


def _plain_latencies(seen: Look) -> str:
    of = seen.tallies.percentiles()
    return _of_each(lambda name, p: f"{1e3 * of[name][p]:.0f}", seen)


def _of_each(words: Callable[[str, str], str], seen: Look) -> str:
    of, percents = seen.tallies.percentiles(), ("p50", "p90", "p99")
    names = [name for name in ("ttft", "tpot", "e2e") if name in of]
    return "; ".join(f"{name.upper()} " + ", ".join(f"{p} {words(name, p)}" for p in percents) + " ms" for name in names)


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{values[0]:.0f}" if high - low < 1 else f"{values[0]:.0f} ({low:.0f} to {high:.0f})"


def _busy(seen: Look) -> str:
    return ", ".join(f"{role} {share:.0%}" for role, share in seen.busy.items())


def _compared(one: Answer, to: float) -> str:
    return f"{one.goodput:.2f} requests/s ({one.goodput / to - 1:+.0%})"


def _mixed(plan: Plan) -> list[str]:
    """What a share of colocated workers beside the split would do, where it was simulated and did not win."""
    mixed = [a for a in plan.answers if a.candidate.prefill and a.candidate.colocated and not a.pruned and a.goodput > 0]
    best = max(mixed, key=lambda a: a.goodput, default=None)
    if best is None or best is plan.winner:
        return []
    return [f"Partly colocated, {best.candidate.ratio}: {_compared(best, plan.winner.goodput)}."]


def _disaggregate(plan: Plan) -> str:
    apart, together = plan.best, plan.colocated
    words = plan.question.hardware.words
    if together.goodput <= 0:
        what = words(together.candidate) if together.candidate.colocated else "nothing colocated"
        return f"Disaggregate: {what} meets the bounds at no rate that was tried."
    if apart.goodput <= 0:
        return f"Do not disaggregate: no ratio meets the bounds, {words(together.candidate)} does at {together.goodput:.2f} requests/s."
    if plan.goal.objective != "goodput":
        return _disaggregate_for_less(plan)
    against = (
        f"the same GPUs colocated with chunked prefill ({words(together.candidate)}, steps of {together.candidate.max_batch_tokens} prompt "
        f"tokens in turn with steps of sequences): {_compared(together, apart.goodput)}"
    )
    if not plan.disaggregates:
        return f"Do not disaggregate: {words(apart.candidate)} serves {apart.goodput:.2f}; {against}."
    if together.goodput > 0.95 * apart.goodput:
        return f"Disaggregating gains little: {against}."
    return f"Disaggregate: {against}."


def _disaggregate_for_less(plan: Plan) -> str:
    """For cost and energy: what the other way of building it would take."""
    winner, other = (plan.best, plan.colocated) if plan.disaggregates else (plan.colocated, plan.best)
    unit = "an hour" if plan.goal.objective == "cost" else "Wh a request"
    ours, theirs = -plan.value(winner), -plan.value(other)
    verdict = "Disaggregate" if plan.disaggregates else "Do not disaggregate"
    instead = f"{theirs:.2f} {unit} instead of {ours:.2f} ({theirs / ours - 1:+.0%})"
    return f"{verdict}: {plan.question.hardware.words(other.candidate)} would take {instead}."


def _growth(plan: Plan) -> str:
    growth, winner = plan.growth, plan.winner
    base = winner.goodput if plan.goal.objective == "goodput" else plan.goal.rate
    grown = f"When load grows by {GROWTH - 1:.0%}, to {GROWTH * base:.2f} requests/s,"
    if growth.unchanged >= plan.question.level.attainment:
        so = "so short a load cannot tell more, plan on more requests" if plan.goal.objective == "goodput" else "nothing has to change"
        return f"{grown} {growth.unchanged:.1%} would be good still: {so}."
    more = plan.question.hardware.num_gpus(growth.candidate) - plan.question.hardware.num_gpus(winner.candidate)
    holds = f"then {growth.attainment:.1%} are good" if growth.attainment >= plan.question.level.attainment else (
        f"which is still not enough ({growth.attainment:.1%}): plan again with more GPUs"
    )  # fmt: skip
    return (
        f"{grown} only {growth.unchanged:.1%} would be good; go to "
        f"{plan.question.hardware.words(growth.candidate)} ({more} GPUs more): {holds}."
    )


def _closest(plan: Plan) -> str:
    tried = [(attainment, rate, a.candidate) for a in plan.answers for rate, attainment in a.tried]
    if not tried:
        return "nothing came near enough to be simulated"
    attainment, rate, candidate = max(tried, key=lambda t: t[0])
    return f"{plan.question.hardware.words(candidate)} at {rate:.3g} requests/s, where at most {attainment:.1%} are good"


def _effort(plan: Plan) -> str:
    load = plan.question.load
    off = [a.sketched / a.goodput - 1 for a in plan.answers if a.goodput > 0 and a.sketched > 0 and not a.pruned]
    missed = off and plan.goal.objective == "goodput"
    sketch = f" (the sketch had missed their goodput by {min(off):+.0%} to {max(off):+.0%})" if missed else ""
    return (
        f"Planned on {len(load.requests):,} requests of the trace, which come at {load.rate:.2f}/s there; {len(plan.sketches)} clusters at "
        f"their best settings were sketched, {len(plan.answers)} simulated{sketch}: {plan.num_simulated:,} requests."
    )
