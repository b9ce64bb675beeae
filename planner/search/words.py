"""A plan in words that a person can act on."""

from __future__ import annotations

from typing import Any

from ..simulator.report import slo_words
from ..simulator.tallies import Tallies
from .goodput import Answer
from .plan import GROWTH, Plan


def sentences(plan: Plan) -> list[str]:
    """The recommendation, one thought a line."""
    winner = plan.best if plan.disaggregates else plan.colocated
    level = plan.question.level
    asked = f"{slo_words(level.bounds)} for {level.attainment:.0%} of the requests"
    if winner.goodput <= 0:
        return [
            f"No way to divide {winner.candidate.num_workers} workers meets {asked}, at any rate.",
            f"The best that was tried: {_closest(plan)}. Loosen the bounds, take quicker hardware, or shorten what is asked.",
        ]
    per_worker = winner.goodput / winner.candidate.num_workers
    said = [
        f"Recommended: {winner.candidate}.",
        f"It serves {winner.goodput:.2f} requests/s ({per_worker:.3f} a worker) with {asked}.{_spread(plan)}",
        *_cost(plan, winner),
        f"At that rate: {_latencies(plan.at_goodput)}.",
        f"At four fifths of it: {_latencies(plan.relaxed)}.",
    ]
    said += [f"Neighbour {a.candidate.ratio}: {_compared(a, winner.goodput)}." for a in plan.neighbours]
    said.append(_disaggregate(plan))
    bigger, attainment = plan.grown
    holds = "holds" if attainment >= level.attainment else "is not enough: add one more on the busier side and plan again"
    said.append(
        f"When load grows by {GROWTH - 1:.0%}: {bigger.ratio} ({attainment:.1%} good at {GROWTH * winner.goodput:.2f} requests/s) {holds}."
    )
    by_means, expected, at_means = plan.means
    said.append(
        f"A plan from mean lengths and service times would build {by_means.ratio} and expect {expected:.2f} requests/s; simulated at that "
        f"rate, {at_means:.1%} of the requests are good."
    )
    said += _short(plan, winner)
    said += [f"Extrapolated: {what} in {share:.1%} of the steps; profile further out." for what, share in plan.extrapolated.items()]
    said.append("TPOT here is (last token - first token) / (tokens - 1). " + _length(plan))
    return said


def as_json(plan: Plan) -> dict[str, Any]:
    """The same for programs."""
    level = plan.question.level
    return {
        "slo": slo_words(level.bounds),
        "attainment": level.attainment,
        "tpot": "(last token - first token) / (tokens - 1)",
        "disaggregate": plan.disaggregates,
        "best": _answer_json(plan.best),
        "colocated": _answer_json(plan.colocated),
        "goodput_in_other_orders": plan.others,
        "at_goodput": plan.at_goodput.percentiles(),
        "at_four_fifths": plan.relaxed.percentiles(),
        "grown": {"ratio": plan.grown[0].ratio, "attainment": plan.grown[1]},
        "from_means": {"ratio": plan.means[0].ratio, "expected": plan.means[1], "attainment": plan.means[2]},
        "candidates": [_answer_json(a) for a in plan.answers],
        "extrapolated": plan.extrapolated,
        "simulated_requests": plan.num_simulated,
        "recommendation": sentences(plan),
    }


def _answer_json(one: Answer) -> dict[str, Any]:
    c = one.candidate
    return {
        "ratio": c.ratio,
        "prefill": c.prefill,
        "decode": c.decode,
        "colocated": c.colocated,
        "max_batch_tokens": c.max_batch_tokens,
        "max_num_seqs": c.max_num_seqs,
        "goodput_per_s": None if one.pruned else one.goodput,
        "bound_per_s": one.bound,
        "tried": sorted(one.tried),
    }


def _spread(plan: Plan) -> str:
    if not plan.others or not plan.disaggregates:
        return ""
    known = [plan.best.goodput, *plan.others]
    return f" The same lengths in other orders: {min(known):.2f} to {max(known):.2f}."


def _short(plan: Plan, winner: Answer) -> list[str]:
    """A warning where the load is over before the cluster has filled."""
    lasts_s, life_s = len(plan.question.load.requests) / winner.goodput, plan.at_goodput.percentiles()["e2e"]["mean"]
    if lasts_s > 4 * life_s:
        return []
    return [f"At that rate these requests last {lasts_s:.0f} s, and one lives {life_s:.1f} s: too optimistic; plan on more (--requests)."]


def _cost(plan: Plan, winner: Answer) -> list[str]:
    price = plan.question.hardware.price_per_hour(winner.candidate)
    if price is None:
        return []
    return [f"That is {price / (3.6 * winner.goodput):.4f} a thousand good requests, at {price:.2f} an hour."]


def _latencies(tallies: Tallies) -> str:
    of = tallies.percentiles()
    shown = []
    for name in ("ttft", "tpot", "e2e"):
        if name in of:
            p50, p90, p99 = (f"{1e3 * of[name][p]:.0f}" for p in ("p50", "p90", "p99"))
            shown.append(f"{name.upper()} p50 {p50}, p90 {p90}, p99 {p99} ms")
    return "; ".join(shown)


def _compared(one: Answer, to: float) -> str:
    return f"{one.goodput:.2f} requests/s ({one.goodput / to - 1:+.0%})"


def _disaggregate(plan: Plan) -> str:
    apart, together = plan.best, plan.colocated
    if apart.goodput <= 0:
        return f"Do not disaggregate: no ratio meets the bounds, {together.candidate} does at {together.goodput:.2f} requests/s."
    against = (
        f"the same workers colocated, in steps of {together.candidate.max_batch_tokens} prompt tokens: {_compared(together, apart.goodput)}"
    )
    if not plan.disaggregates:
        return f"Do not disaggregate: {apart.candidate.ratio} serves {apart.goodput:.2f}; {against}."
    if together.goodput > 0.95 * apart.goodput:
        return f"Disaggregating gains little: {against}."
    return f"Disaggregate: {against}."


def _closest(plan: Plan) -> str:
    tried = [(attainment, rate, a.candidate) for a in (*plan.answers, plan.colocated) for rate, attainment in a.tried]
    attainment, rate, candidate = max(tried, key=lambda t: t[0])
    return f"{candidate.ratio} at {rate:.3g} requests/s, where at most {attainment:.1%} are good"


def _length(plan: Plan) -> str:
    load = plan.question.load
    planned = f"Planned on {len(load.requests):,} requests of the trace, which come at {load.rate:.2f}/s there"
    return f"{planned}; {plan.num_simulated:,} were simulated."
