"""Which prefill worker and which decode worker a request goes to: pure functions over a snapshot of the
workers.

    round_robin   the worker that was chosen longest ago
    least_loaded  the least work waiting
    prefix        the longest prefix that is really cached; least loaded among equals
    sticky        the worker that the session's name hashes to; losing a worker moves only its own sessions
    hybrid        the least time until the prompt is computed, as tokens waiting there plus tokens not cached
                  there; a session's own worker wins where the difference is under a block

For decode workers the hybrid policy takes the one with the most room left after the request; cached blocks
count as room. Where more than sixteen could be the best, sixteen are compared, in turn (open_workers.py), and
sixteen of those that have the prompt cached up to each of at most sixteen blocks (cache_index.py).

Where another worker has more of the prompt cached than the one that computes it, its blocks are pulled.

A mixed worker generates for what it computes itself. Where all are mixed, the hybrid policy takes the one
with the most room, less what waits: prompts, and sequences for this one. Where some are, the decode worker is
chosen first; then it computes the prompt, or a prefill worker does, whichever costs less.

A process that borrows prefers one role. When no pair of the pools has room, it computes a prompt and
generates for it itself, if that costs less than to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Literal, NamedTuple

from .cache_index import CacheIndex
from .open_workers import MAX_COMPARED
from .request import Request
from .worker import DELAY_WEIGHT, WorkerRecord, hash64, shuffled

LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:")
SENDS_PREFIXES = 5
"""The first wire version with SendPrefix."""
BORROWED_WEIGHT = 1 / 4
"""A sequence that waits for a borrowed prompt counts as this much of a prompt that waits."""

Policy = Literal["hybrid", "round_robin", "least_loaded", "prefix", "sticky"]


class Need(NamedTuple):
    """What is routed."""

    num_tokens: int
    first: bytes | None  # hash of its first full block; a worker without it has no prefix cached
    hashes: Callable[[], list[bytes]]  # of all its full blocks
    session: str  # may be empty
    turn: int  # differs from request to request

    @classmethod
    def of(cls, request: Request, worker: WorkerRecord, turn: int) -> Need:
        """Return what is needed of a worker of this one's kind."""
        return cls(
            request.num_tokens,
            request.first_hash(worker),
            lambda: request.hashes(worker),
            request.session,
            turn,
        )


class PrefixSource(NamedTuple):
    """A worker that has cached blocks which another one is to compute a prompt with."""

    worker: WorkerRecord
    hashes: list[bytes]  # of the blocks, from the prompt's first one on


def can_send_prefix(source: WorkerRecord, prefill: WorkerRecord) -> bool:
    """Return whether this worker can send cached blocks to that one, of another process. Where blocks alone
    are of no use, without the state behind them, decode workers have none."""
    theirs, ours = prefill.hello, source.hello
    return (
        not (source.fixed_blocks and source.role == "decode")
        and source.kind == prefill.kind
        and not (source.draining or source.ended or source.unreached_since)
        and source is not prefill
        and not (ours.process and ours.process == theirs.process)
        and ours.wire_version >= SENDS_PREFIXES
        and theirs.wire_version >= SENDS_PREFIXES
        and (ours.host == theirs.host or not theirs.peer_address.startswith(LOOPBACK))
    )


def prefix_source(
    request: Request, prefill: WorkerRecord, cache: CacheIndex, turn: int, least: int
) -> PrefixSource | None:
    """Return a worker that has enough more of the prompt cached than the one that computes it: ``least``
    tokens; 0: nothing is pulled."""
    size = prefill.block_size
    if not least or request.num_tokens <= least or prefill.window or request.needs_prompt_logprobs:
        return None
    if request.first_hash(prefill) not in cache:
        return None
    hashes = request.hashes(prefill)[: (request.num_tokens - 1) // size]  # the last token is computed
    for block_hash, holders in cache.levels(hashes):
        if block_hash in prefill.cached:
            return None
        first = turn % len(holders)
        in_turn = (holders[first : first + MAX_COMPARED] + holders)[:MAX_COMPARED]
        if (source := next((w for w in in_turn if can_send_prefix(w, prefill)), None)) is not None:
            num_blocks = source.match_prefix(hashes)
            enough = (num_blocks - prefill.match_prefix(hashes)) * size >= least
            return PrefixSource(source, hashes[:num_blocks]) if enough else None
    return None


def choose_prefill(policy: Policy, workers: Sequence[WorkerRecord], need: Need) -> WorkerRecord:
    """Return the prefill worker for this prompt, of one or more."""
    if len(workers) == 1:
        return workers[0]
    if policy == "hybrid":
        costs = [w.rank - _num_cached(w, need) * w.block_size for w in workers]
        best = min(costs)
        if need.session:
            near = (w for cost, w in zip(costs, workers, strict=True) if cost - best < w.block_size)
            return _sticky(list(near), need)
        return _in_turn([w for cost, w in zip(costs, workers, strict=True) if cost == best], need)
    return _by_policy(policy, workers, need, lambda w: w.pending_tokens)


def choose_decode(policy: Policy, workers: Sequence[WorkerRecord], need: Need) -> WorkerRecord:
    """Return the decode worker for this sequence, of one or more."""
    if len(workers) == 1:
        return workers[0]
    if policy == "hybrid":
        if any(need.first in w.cached for w in workers):
            shares = [_share_left(w, need) for w in workers]
        else:
            shares = [w.share_left(w.blocks_for(need.num_tokens)) for w in workers]
        most = max(shares)
        return _in_turn([w for share, w in zip(shares, workers, strict=True) if share == most], need)
    return _by_policy(policy, workers, need, lambda w: len(w.dispatches) + w.num_others)


def fitting(
    prefills: list[WorkerRecord], decodes: list[WorkerRecord]
) -> tuple[list[WorkerRecord], list[WorkerRecord]]:
    """Return the workers of either role that fit one of the other role.

    What a prefill worker computes may go to any decode worker of its kind; a mixed one keeps it.
    """
    kinds, processes = {d.kind for d in decodes}, {(d.kind, d.hello.process) for d in decodes}
    prefills = [
        p for p in prefills if ((p.kind, p.hello.process) in processes if p.is_mixed else p.kind in kinds)
    ]
    kinds = {p.kind for p in prefills if not p.is_mixed}
    processes = {(p.kind, p.hello.process) for p in prefills if p.is_mixed}
    return prefills, [d for d in decodes if d.kind in kinds or (d.kind, d.hello.process) in processes]


def holding(
    request: Request, candidates: list[WorkerRecord], open_workers: Iterable[WorkerRecord]
) -> list[WorkerRecord]:
    """Return the candidates that can hold the request with all tokens that it may get.

    Where no open worker that has its adapter can, return all: it then ends early, with ``length``.
    """
    num_tokens, adapter = request.max_tokens, request.adapter
    if not any(w.max_model_len >= num_tokens and w.has(adapter) for w in open_workers):
        return candidates
    return [w for w in candidates if w.max_model_len >= num_tokens]


def choose_pair(
    policy: Policy, prefills: Sequence[WorkerRecord], decodes: Sequence[WorkerRecord], need: Need
) -> tuple[WorkerRecord, WorkerRecord]:
    """Return the workers where some are mixed. Each of ``decodes`` fits at least one of ``prefills``."""
    mixed = {(p.kind, p.hello.process): p for p in prefills if p.is_mixed}
    if policy == "hybrid" and len(mixed) == len(prefills):
        pairs = [(mixed[d.kind, d.hello.process], d) for d in decodes]
        return min(pairs, key=lambda pair: (_mixed_load(pair[0], pair[1], need), _turns(need)(pair[1])))
    decode = choose_decode(policy, decodes, need)
    local = mixed.get((decode.kind, decode.hello.process))
    others = [w for w in prefills if not w.is_mixed and w.kind == decode.kind]
    if local is None or not others:
        return local or choose_prefill(policy, others, need), decode
    remote = choose_prefill(policy, others, need)
    return (local if _mixed_cost(local, decode, need) <= _cost(remote, need) else remote), decode


def choose_borrower(
    borrowers: Sequence[tuple[WorkerRecord, WorkerRecord]], need: Need, max_cost: float
) -> tuple[WorkerRecord, WorkerRecord] | None:
    """Return both workers of the process that borrows this request; None: to wait costs less.

    Costs are in tokens that are computed before this prompt's first token. A sequence that is delayed by the
    prompt counts as ``BORROWED_WEIGHT`` of a prompt that waits: the delay is spread over its tokens, but its
    later end slows all where the batch is near its limit.
    """
    costs = [_mixed_cost(prefill, decode, need, BORROWED_WEIGHT) for prefill, decode in borrowers]
    least = min(costs, default=inf)
    return None if least > max_cost else borrowers[costs.index(least)]


def _cost(prefill: WorkerRecord, need: Need) -> int:
    """Return the tokens that are computed until this prompt is."""
    return prefill.pending_tokens + need.num_tokens - _num_cached(prefill, need) * prefill.block_size


def _mixed_cost(prefill: WorkerRecord, decode: WorkerRecord, need: Need, weight: float = 1.0) -> float:
    """Return the same for a process of both roles, whose sequences wait. ``weight``: of their delay."""
    cost = _cost(prefill, need)
    num_delayed = len(decode.dispatches - prefill.pending.keys()) + decode.num_others
    return cost + (cost - prefill.pending_tokens) * num_delayed * weight


def _mixed_load(prefill: WorkerRecord, decode: WorkerRecord, need: Need) -> float:
    """Return what waits there, as a share of the prompts that may, less the share of room that is left."""
    waiting = _mixed_cost(prefill, decode, need, DELAY_WEIGHT) - _cost(prefill, need) + prefill.pending_tokens
    return waiting / prefill.queue_budget - _share_left(decode, need)


def _by_policy(
    policy: Policy, workers: Sequence[WorkerRecord], need: Need, load: Callable[[WorkerRecord], int]
) -> WorkerRecord:
    if policy == "round_robin":
        return sorted(workers, key=lambda w: w.id)[need.turn % len(workers)]
    if policy == "sticky" and need.session:
        return _sticky(workers, need)
    turn = _turns(need)
    if policy == "prefix":
        return min(workers, key=lambda w: (-_num_cached(w, need), load(w), turn(w)))
    return min(workers, key=lambda w: (load(w), turn(w)))


def _num_cached(worker: WorkerRecord, need: Need) -> int:
    """Return how many of its leading blocks this worker has cached."""
    return worker.match_prefix(need.hashes()) if need.first in worker.cached else 0


def _share_left(worker: WorkerRecord, need: Need) -> float:
    """Return the share of rows or blocks that is left with this sequence, plus a bonus for cached blocks."""
    needed, cached = worker.blocks_for(need.num_tokens), _num_cached(worker, need)
    return worker.share_left(needed - cached) + cached / max(1, needed) * 0.25


def _in_turn(workers: Sequence[WorkerRecord], need: Need) -> WorkerRecord:
    """Return the one of several equals whose turn it is."""
    return workers[0] if len(workers) == 1 else min(workers, key=_turns(need))


def _sticky(workers: Sequence[WorkerRecord], need: Need) -> WorkerRecord:
    number = hash64(need.session)
    return max(workers, key=lambda w: shuffled(w.name_hash, number))


def _turns(need: Need) -> Callable[[WorkerRecord], int]:
    """Return a tie-break that rotates, so that the same worker is not always first."""
    return lambda worker: shuffled(worker.name_hash, need.turn)
