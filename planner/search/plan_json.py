"""A plan for programs."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from .goodput import Answer
from .looks import Glance, Look
from .plan import Plan
from .words import sentences


def as_json(plan: Plan) -> dict[str, Any]:
    level, hardware = plan.question.level, plan.question.hardware
    winner = plan.winner.candidate
    return {
        "slo": level.bounds.words(),
        "attainment": level.attainment,
        "tpot": "(last token - first token) / (tokens - 1)",
        "objective": plan.goal.objective,
        "rate_per_s": None if plan.goal.objective == "goodput" else plan.goal.rate,
        "disaggregate": plan.disaggregates,
        "recommended": hardware.words(winner),
        "gpus": hardware.num_gpus(winner),
        "price_per_hour": hardware.price_per_hour(winner),
        "watts": hardware.watts(winner),
        "energy_wh_a_request": plan.energy_wh,
        "best": _answer(plan.best),
        "split": {**_answer(plan.split), "compared": _compared(plan, plan.split)},
        "colocated": {**_answer(plan.colocated), "compared": _compared(plan, plan.colocated)},
        "neighbours": [_answer(a) for a in plan.neighbours],
        "goodput_in_other_orders": [goodput for goodput, _ in plan.others],
        "goodput_if_slower": plan.if_slower,
        "at_goodput": _look(plan.at_goodput),
        "at_goodput_in_other_orders": [_look(seen) for _, seen in plan.others],
        "relaxed": _look(plan.relaxed),
        "grown": {
            "ratio": hardware.words(plan.growth.candidate),
            "attainment": plan.growth.attainment,
            "unchanged": plan.growth.unchanged,
        },
        "from_means": {
            "ratio": hardware.words(plan.means.candidate),
            "expected": plan.means.expected,
            "attainment": plan.means.attainment,
        },
        "sustained_per_s": plan.sustained,
        "whole_trace_per_s": plan.whole and plan.whole[1],
        "candidates": [_answer(a) for a in plan.answers],
        "sketched": [
            {"ratio": hardware.words(c), "options": f"{c.ratio}, {c.options}", "goodput_per_s": g}
            for c, g in plan.sketches.items()
        ],
        "curves": {hardware.words(c): [_glance(g) for g in seen] for c, seen in plan.curves.items()},
        "sizes": [
            {"ratio": c.ratio, "price_per_hour": hardware.price_per_hour(c), **_glance(g)}
            for c, g in plan.sizes.items()
        ],
        "simulated_requests": plan.num_simulated,
        "warnings": plan.warnings,
        "recommendation": sentences(plan),
    }


def _answer(one: Answer) -> dict[str, Any]:
    c = one.candidate
    return {
        "ratio": c.ratio,
        "prefill": c.prefill,
        "decode": c.decode,
        "colocated": c.colocated,
        "prefill_kind": c.prefill_kind,
        "decode_kind": c.decode_kind,
        "beside": [asdict(group) for group in c.beside],
        "max_batch_tokens": c.max_batch_tokens,
        "max_num_seqs": c.max_num_seqs,
        "mover": c.mover,
        "goodput_per_s": None if one.pruned else one.goodput,
        "sketched_per_s": one.sketched,
        "bound_per_s": one.bound,
        "at_bound": one.at_bound,
        "tried": sorted(one.tried),
    }


def _compared(plan: Plan, one: Answer) -> float | None:
    """By the objective, over the recommended cluster's: 0.9 has a tenth less goodput, or costs a tenth less.
    None where it failed."""
    ours, theirs = abs(plan.value(plan.winner)), abs(plan.value(one))
    return theirs / ours if ours and isfinite(ours) and theirs and isfinite(theirs) else None


def _look(seen: Look) -> dict[str, Any]:
    return {
        "rate_per_s": seen.rate,
        "attainment": seen.tallies.attainment,
        "latency_s": seen.tallies.percentiles(),
        "busy": seen.busy,
        "extrapolated": seen.extrapolated,
    }


def _glance(seen: Glance) -> dict[str, Any]:
    return {
        "rate_per_s": seen.rate,
        "attainment": seen.attainment,
        "ttft_p90_s": seen.ttft_p90_s,
        "tpot_p90_s": seen.tpot_p90_s,
        "busy": seen.busy,
    }
