"""What a chaos run found: streams lost, answers that differ from those without a fault, and all of it in one
line."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .chaos_streams import Answer, Stream

BAD = ("streams_lost", "streams_wrong", "blocks_leaked", "batches_wrong", "not_metered_once")
"""Findings that fail a run."""


def judge(ended: list[Stream], expected: dict[int, Answer]) -> dict[str, Any]:
    """Lost and wrong."""
    lost = [s for s in ended if s.error]
    wrong = [s for s in ended if not s.error and s.answer != expected[s.question]]
    return {
        "streams": len(ended),
        "pieces": sum(len(times) for s in ended for times in s.arrivals.values()),
        "streams_lost": len(lost),
        "why_lost": dict(Counter(s.error[:160] for s in lost)),
        "streams_wrong": len(wrong),
        "first_wrong": first_difference(wrong[0].answer, expected[wrong[0].question]) if wrong else None,
    }


def first_difference(got: Answer, wanted: Answer) -> dict[str, Any]:
    """The first difference of two answers."""
    for choice, ((text, reason, logprobs), (right, right_reason, right_logprobs)) in enumerate(
        zip(got, wanted, strict=False)
    ):
        if (text, reason) != (right, right_reason):
            at = next(
                (i for i, (a, b) in enumerate(zip(text, right, strict=False)) if a != b),
                min(len(text), len(right)),
            )
            return {
                "choice": choice,
                "at": at,
                "of": len(right),
                "got": text[at : at + 40],
                "wanted": right[at : at + 40],
                "reason": reason,
            }
        if logprobs != right_logprobs:
            pairs = zip(logprobs, right_logprobs, strict=False)
            return {
                "choice": choice,
                "logprobs": [len(logprobs), len(right_logprobs)],
                "first": next((p for p in pairs if p[0] != p[1]), None),
            }
    return {"choices": [len(got), len(wanted)]}


def verdict(found: dict[str, Any]) -> str:
    """In one line."""
    goal, every = found["recovery"]["goal"], found["recovery"]["all_s"]
    beside = goal.get("of_it_beside_the_computing_s", {})
    return (
        f"{found['streams']} streams, {sum(found['faults'].values())} faults: {found['streams_lost']} lost, "
        f"{found['streams_wrong']} wrong, {sum(found['blocks_leaked'].values())} blocks leaked, "
        f"{len(found['batches_wrong'])} of {found['batches'].get('completed', 0)} batches wrong, "
        f"{found.get('not_metered_once', 'no')} streams not metered once; recovery p50 {every.get('p50')} "
        f"s, p99 {every.get('p99')} s; after kills beside the computing: p50 {beside.get('p50')} s, p99 "
        f"{beside.get('p99')} s (goal 1 s: {goal.get('met')})"
    )
