"""Whether to disaggregate at all, and what other clusters would do, in words."""

from __future__ import annotations

from .goodput import Answer
from .plan import Plan

NEARLY_AS_GOOD = 0.95


def whether_to_disaggregate(plan: Plan) -> str:
    """One sentence. Both sides are in it, but the one that is recommended."""
    together = "the same GPUs colocated, prompts and tokens in one step"
    sides = [("purely split", plan.split), (together, plan.colocated)]
    others = [f"{name}{_described(plan, one)}" for name, one in sides if one is not plan.winner]
    return f"{_verdict(plan)}: {'; '.join(others)}."


def _verdict(plan: Plan) -> str:
    if plan.is_at_most(plan.best) and plan.is_at_most(plan.colocated):
        return "Whether to disaggregate this load does not tell"
    if not plan.disaggregates:
        return "Do not disaggregate"
    if plan.goal.objective == "goodput" and plan.colocated.goodput > NEARLY_AS_GOOD * plan.best.goodput:
        return "Disaggregating gains little"
    return "Disaggregate" if plan.winner is plan.split else "Disaggregate in part"


def _described(plan: Plan, one: Answer) -> str:
    c = one.candidate
    if not c.num_workers:
        return ": cannot be built"
    what = f", {plan.question.hardware.words(c)}, steps of {c.max_batch_tokens} prompt tokens"
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
    value = f"{theirs:.3g}" if plan.goal.objective == "energy" else f"{theirs:.2f}"
    return f"{at_most}{value} {unit} ({theirs / ours - 1:+.0%})"
