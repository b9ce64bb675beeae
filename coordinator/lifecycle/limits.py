"""Bounds of the coordinator's patience, and which of them a request has passed. Pure; times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .request import Request


@dataclass(frozen=True, slots=True)
class LifecycleLimits:
    """Bounds of the coordinator's patience; times in seconds."""

    max_queue: int = 1024
    max_attempts: int = 4  # failed ones in a row, without progress
    suspect_after: int = 2  # worker deaths in a row while a request ran there: from then on it is tried alone
    max_deaths: int = 4  # so many in a row, and it is tried no more; after so many in all, more and more progress has to be between two
    dead_after_s: float = 1.5
    unreachable_s: float = 0.25  # with its connection gone it is dead sooner
    progress_timeout_s: float = 30.0
    heartbeat_s: float = 0.25
    lost_after_s: float = 1.0  # a dispatch that no worker reports for so long is lost
    unserved_s: float = 30.0  # an admitted request waits so long for a worker to come back
    starving_s: float = 2.0  # who has waited so long is not overtaken any more
    queued_batches: int = 2  # a prefill worker is given work for so many of its steps ahead
    queue_timeout_s: float = 300.0
    prefill_timeout_s: float = 300.0
    handoff_timeout_s: float = 120.0
    siblings: tuple[str, ...] = ()  # where more coordinator processes of this host listen to workers
    ttft_slo_s: Mapping[str, float] = field(default_factory=dict)  # by priority class: who would wait longer is refused
    token_timeout_s: float = 120.0  # between two tokens of one sequence, whatever happens in between


def shortest_timeout(limits: LifecycleLimits) -> float:
    """Whoever has been in its stage, and had its last token, for less, has passed no deadline but perhaps the request's own."""
    return min(limits.queue_timeout_s, limits.prefill_timeout_s, limits.handoff_timeout_s, limits.token_timeout_s)


def own_deadline(request: Request) -> str:
    """The sentence for a request whose own time is over, whether the coordinator or a worker sees it first."""
    took = request.deadline - request.arrival
    return f"the request did not end within its {took:g} s (stage: {request.state}); allow more time or ask for fewer tokens"


def passed_deadline(request: Request, limits: LifecycleLimits, now: float) -> str:
    """Which deadline the request has passed, and what to do about it, as a sentence; empty where none."""
    if now >= request.deadline:
        return own_deadline(request)
    waited, stage = now - request.entered, request.state
    if stage == "queue" and waited > limits.queue_timeout_s:
        return f"no worker had room for {limits.queue_timeout_s:g} s (stage: queue); try again later, or add workers"
    if stage == "prefill" and waited > limits.prefill_timeout_s:
        return f"the prompt was not computed within {limits.prefill_timeout_s:g} s (stage: prefill); try again or shorten the prompt"
    if stage == "handoff" and waited > limits.handoff_timeout_s:
        return f"no decode worker took the prompt's KV blocks over within {limits.handoff_timeout_s:g} s (stage: handoff); try again later"
    if request.tokens and now - request.token_at > limits.token_timeout_s:
        return f"no token came for {limits.token_timeout_s:g} s (stage: {stage}); try again later"
    return ""
