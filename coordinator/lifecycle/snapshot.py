"""What the lifecycle knows, as values, for code outside the coordinator that watches the load and the
workers.

Pure. Times are seconds; moments are of a monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...transport.messages.messages import Load, Role
from .lifecycle import Lifecycle
from .request import Ended, Request, State


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One connected worker."""

    worker_id: str
    process: str  # "": it cannot change its role
    role: Role
    is_mixed: bool
    is_open: bool  # it takes new work
    is_draining: bool
    num_dispatches: int
    max_batch_tokens: int
    max_num_seqs: int
    num_blocks: int
    load: Load | None  # its newest report


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that has not ended."""

    arrival: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int  # so far
    state: State
    entered: float  # when ``state`` began
    token_at: float  # when the newest output token came


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that workers have served, or failed to serve."""

    arrival: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: float  # infinite: it failed
    tpot_s: float | None  # None: it has fewer than two tokens


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Workers and requests at one moment."""

    workers: tuple[WorkerState, ...]
    requests: tuple[RunningRequest, ...]
    changing: Mapping[str, bool]
    """Processes that are changing their role; True: already connected in the new one."""


def snapshot_of(lifecycle: Lifecycle) -> Snapshot:
    """Return the present state of ``lifecycle``."""
    pools = lifecycle.pools
    takes_work = {worker.id for role in ("prefill", "decode") for worker in pools.open_of_role(role)}
    workers = tuple(
        WorkerState(
            worker.hello.worker_id,
            worker.hello.process,
            worker.role,
            worker.is_mixed,
            worker.id in takes_work,
            worker.draining,
            len(worker.dispatches),
            worker.max_batch_tokens,
            worker.max_num_seqs,
            worker.num_blocks,
            worker.load,
        )
        for worker in pools.workers.values()
    )
    requests = tuple(
        RunningRequest(
            request.arrival,
            len(request.prompt_token_ids),
            min(request.num_cached_tokens or 0, len(request.prompt_token_ids)),
            len(request.tokens),
            request.state,
            request.entered,
            request.token_at,
        )
        for request in lifecycle.requests.values()
    )
    changing = {name: record.began_s is not None for name, record in lifecycle.flips.under_way.items()}
    return Snapshot(workers, requests, changing)


def finished(request: Request, ended: Ended) -> FinishedRequest | None:
    """Return how an ended request was served; None if it was refused or never admitted."""
    if ended.ledger is None or ended.error in ("refused", "unavailable"):
        return None
    stages, count, prompt = ended.stages, ended.num_output_tokens, len(request.prompt_token_ids)
    failed = ended.error is not None
    ttft_s = math.inf if failed else stages.parse + stages.queue + stages.prefill
    tpot_s = (stages.handoff + stages.decode) / (count - 1) if count > 1 else None
    return FinishedRequest(
        request.arrival, prompt, min(ended.num_cached_tokens, prompt), count, ttft_s, tpot_s
    )
