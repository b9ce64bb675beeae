"""The coordinator's limits, and the deadlines that follow from them. Pure.

Times in seconds; deadlines of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .request import Request

MAX_MOVE_S = 30.0
"""A move between decode workers is given up after this time. The workers' own deadlines are much shorter."""


@dataclass(frozen=True, slots=True)
class LifecycleLimits:
    """Limits of one coordinator. Times in seconds."""

    max_queue: int = 1024  # requests
    max_attempts: int = 4  # failed in a row, without progress
    suspect_after: int = 2  # deaths of workers that ran it, in a row; then it runs apart from other suspects
    max_deaths: int = 4  # in a row; beyond as many in all, each doubles the progress that clears the request
    dead_after_s: float = 1.5  # of silence
    unreachable_s: float = 0.25  # of silence, where the connection is gone
    progress_timeout_s: float = 30.0  # busy without finishing a step
    heartbeat_s: float = 0.25
    lost_after_s: float = 1.0  # a dispatch that no worker reports for this time is lost
    unserved_s: float = 30.0  # an admitted request waits this long for a worker to come back
    starving_s: float = 2.0  # a request that has waited this long is not overtaken
    queued_batches: int = 2  # steps' worth of prompts that a prefill worker is given ahead
    queue_timeout_s: float = 300.0
    prefill_timeout_s: float = 300.0
    handoff_timeout_s: float = 120.0
    min_pull_tokens: int = 128  # that another worker has cached: fewer are computed; 0: none is pulled
    siblings: tuple[str, ...] = ()  # addresses of this host's other coordinator processes
    ttft_slo_s: Mapping[str, float] = field(default_factory=dict)  # by priority class; bound of the forecast
    token_timeout_s: float = 120.0  # between two tokens of one sequence, whatever happens in between


def min_timeout(limits: LifecycleLimits) -> float:
    """Return the shortest time after a state began, or the newest token came, at which a timeout may pass."""
    return min(
        limits.queue_timeout_s, limits.prefill_timeout_s, limits.handoff_timeout_s, limits.token_timeout_s
    )


def no_deadline_before(request: Request, min_timeout_s: float) -> float:
    """Return a time before which the request passes no deadline, whatever states and tokens follow."""
    newest = min(request.entered, request.token_at) if request.tokens else request.entered
    return min(request.deadline, newest + min_timeout_s)


def own_deadline(request: Request) -> str:
    """Return the message for a request that has passed its own deadline, whether the coordinator or a
    worker notices."""
    allowed_s = request.deadline - request.arrival
    what = f"the request did not end within its {allowed_s:g} s (stage: {request.state})"
    return f"{what}; allow more time or ask for fewer tokens"


def passed_deadline(request: Request, limits: LifecycleLimits, now: float) -> str:
    """Return a message that names the deadline that has passed and the remedy; empty if none has."""
    if now >= request.deadline:
        return own_deadline(request)
    waited_s, state = now - request.entered, request.state
    if state == "queue" and waited_s > limits.queue_timeout_s:
        waited = f"for {limits.queue_timeout_s:g} s (stage: queue)"
        return f"no worker had room {waited}; try again later, or add workers"
    if state == "prefill" and waited_s > limits.prefill_timeout_s:
        took = f"within {limits.prefill_timeout_s:g} s (stage: prefill)"
        return f"the prompt was not computed {took}; try again or shorten the prompt"
    if state == "handoff" and waited_s > limits.handoff_timeout_s:
        took = f"within {limits.handoff_timeout_s:g} s (stage: handoff)"
        return f"no decode worker took the prompt's KV blocks over {took}; try again later"
    if request.tokens and now - request.token_at > limits.token_timeout_s:
        return f"no token came for {limits.token_timeout_s:g} s (stage: {state}); try again later"
    return ""


def is_lost(request: Request, limits: LifecycleLimits, now: float) -> bool:
    """Whether every worker that should hold this dispatch has reported since it had time to receive it,
    without naming it.

    A silent worker has not: whether it is dead is another question, and no failure of the request.
    """
    reported_by = request.entered + limits.lost_after_s
    if now < reported_by:
        return False
    if request.move is not None and not is_move_lost(request, limits, now):
        return False  # the report of the worker that handed it over may come before that of the target
    holders = (
        request.prefill if request.state != "decode" else None,
        request.decode if request.state != "prefill" else None,
    )
    return all(w is None or w.reported_without(request.dispatch, reported_by) for w in holders)


def is_move_lost(request: Request, limits: LifecycleLimits, now: float) -> bool:
    """Whether both ends of its move have reported since they had time to receive it, without naming it; or
    it takes too long."""
    move = request.move
    assert move is not None, "only a request that moves can lose its move"
    reported_by, ends = move.since + limits.lost_after_s, (request.decode, move.target)
    if all(w is None or w.reported_without(move.dispatch, reported_by) for w in ends):
        return True
    return now - move.since > MAX_MOVE_S
