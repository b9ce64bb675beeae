"""Which prefill worker and which decode worker a request goes to: pure functions over a snapshot of the workers.

round_robin   the worker that was chosen longest ago
least_loaded  the least work waiting
prefix        the longest prefix really cached; least loaded among equals
sticky        the worker that the session's name hashes to (rendezvous, so that a lost worker moves only its own sessions)
hybrid        the least time until the prompt is computed: tokens waiting there plus tokens not cached there;
              a session's own worker wins where the difference is under a block

Decode workers are chosen by what the policy means there: the hybrid takes the worker with the most room left after the request,
counting cached blocks as room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from .pools import Worker

Policy = Literal["hybrid", "round_robin", "least_loaded", "prefix", "sticky"]


@dataclass(frozen=True, slots=True)
class Need:
    """What is routed: how long it is, the hashes of its full blocks, its session (may be empty), how often anything was routed."""

    num_tokens: int
    hashes: list[bytes]
    session: str
    turn: int


def choose_prefill(policy: Policy, workers: Sequence[Worker], need: Need) -> Worker | None:
    """The prefill worker for this prompt; None where there is none to choose from."""
    if len(workers) < 2:
        return next(iter(workers), None)
    if policy == "hybrid":
        costs = {w.id: _uncached(w, need) + w.pending_tokens for w in workers}
        best = min(costs.values())
        near = [w for w in workers if costs[w.id] - best < w.block_size]
        return _sticky(near, need) if need.session else min(near, key=lambda w: (costs[w.id], _turn(w, need)))
    return _by_policy(policy, workers, need, lambda w: w.pending_tokens)


def choose_decode(policy: Policy, workers: Sequence[Worker], need: Need) -> Worker | None:
    """The decode worker for this sequence; None where there is none to choose from."""
    if len(workers) < 2:
        return next(iter(workers), None)
    if policy == "hybrid":
        return max(workers, key=lambda w: (_share_left(w, need), -_turn(w, need)))
    return _by_policy(policy, workers, need, lambda w: len(w.dispatches) + w.num_others)


def _by_policy(policy: Policy, workers: Sequence[Worker], need: Need, load: Callable[[Worker], int]) -> Worker:
    if policy == "round_robin":
        return sorted(workers, key=lambda w: w.id)[need.turn % len(workers)]
    if policy == "sticky" and need.session:
        return _sticky(workers, need)
    if policy == "prefix":
        return min(workers, key=lambda w: (-w.match_prefix(need.hashes), load(w), _turn(w, need)))
    return min(workers, key=lambda w: (load(w), _turn(w, need)))


def _uncached(worker: Worker, need: Need) -> int:
    return need.num_tokens - worker.match_prefix(need.hashes) * worker.block_size


def _share_left(worker: Worker, need: Need) -> float:
    """Room left, as the smaller share of rows and of blocks, once this sequence is there."""
    rows = 1 - (len(worker.dispatches) + worker.num_others + 1) / max(1, worker.hello.max_num_seqs)
    cached = worker.match_prefix(need.hashes)
    blocks = (worker.blocks_available + cached - worker.blocks_for(need.num_tokens)) / max(1, worker.hello.num_blocks)
    return min(rows, blocks) + cached / max(1, worker.blocks_for(need.num_tokens)) * 0.25


def _sticky(workers: Sequence[Worker], need: Need) -> Worker:
    return max(workers, key=lambda w: blake2b(f"{need.session}\0{w.hello.worker_id}".encode(), digest_size=8).digest())


def _turn(worker: Worker, need: Need) -> int:
    """A tie-break that rotates: the same worker is not always first."""
    return int.from_bytes(blake2b(f"{need.turn}\0{worker.hello.worker_id}".encode(), digest_size=4).digest(), "little")
