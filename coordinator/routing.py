"""Which prefill worker and which decode worker a request goes to: pure functions over a snapshot of the workers.

round_robin   the worker that was chosen longest ago
least_loaded  the least work waiting
prefix        the longest prefix really cached; least loaded among equals
sticky        the worker that the session's name hashes to (rendezvous, so that a lost worker moves only its own sessions)
hybrid        the least time until the prompt is computed: tokens waiting there plus tokens not cached there;
              a session's own worker wins where the difference is under a block

Decode workers are chosen by what the policy means there: the hybrid takes the worker with the most room left after the request,
counting cached blocks as room.

A mixed worker generates for what it computes. Where there are any, the decode worker is chosen first; it computes the prompt itself (local
prefill), or a prefill worker does, whichever costs less.
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
        hashes, first = need.hashes, _first(need)
        cached = [w.match_prefix(hashes) * w.block_size if first in w.cached else 0 for w in workers]
        costs = [need.num_tokens - tokens + w.pending_tokens for tokens, w in zip(cached, workers, strict=True)]
        best = min(costs)
        near = [(cost, w) for cost, w in zip(costs, workers, strict=True) if cost - best < w.block_size]
        if need.session:
            return _sticky([w for _, w in near], need)
        return _in_turn([w for cost, w in near if cost == best], need)
    return _by_policy(policy, workers, need, lambda w: w.pending_tokens)


def choose_decode(policy: Policy, workers: Sequence[Worker], need: Need) -> Worker | None:
    """The decode worker for this sequence; None where there is none to choose from."""
    if len(workers) < 2:
        return next(iter(workers), None)
    if policy == "hybrid":
        shares = _shares_left(workers, need)
        most = max(shares)
        return _in_turn([w for share, w in zip(shares, workers, strict=True) if share == most], need)
    return _by_policy(policy, workers, need, lambda w: len(w.dispatches) + w.num_others)


def fits(prefill: Worker, decode: Worker) -> bool:
    """Whether what this prefill worker computes may go to this decode worker: from a mixed one to itself alone."""
    return prefill.kind == decode.kind and (not prefill.hello.mixed or _are_one(prefill, decode))


def choose_pair(policy: Policy, prefills: Sequence[Worker], decodes: Sequence[Worker], need: Need) -> tuple[Worker | None, Worker | None]:
    """Where some are mixed. Each of ``decodes`` fits one of ``prefills`` at least."""
    decode = choose_decode(policy, decodes, need)
    if decode is None:
        return None, None
    local = next((w for w in prefills if _are_one(w, decode)), None)
    remote = choose_prefill(policy, [w for w in prefills if not w.hello.mixed and w.kind == decode.kind], need)
    if local is None or remote is None:
        return local or remote, decode
    return (local if _cost_there(local, decode, need) <= _cost(remote, need) else remote), decode


def _are_one(prefill: Worker, decode: Worker) -> bool:
    return prefill.hello.mixed and prefill.hello.process == decode.hello.process


def _cost(prefill: Worker, need: Need) -> int:
    """Tokens that are computed until this prompt is."""
    return prefill.pending_tokens + need.num_tokens - prefill.match_prefix(need.hashes) * prefill.block_size


def _cost_there(prefill: Worker, decode: Worker, need: Need) -> int:
    """The same on a mixed worker. Every sequence that it generates for waits as long as the prompt's steps take."""
    cost = _cost(prefill, need)
    return cost + (cost - prefill.pending_tokens) * (len(decode.dispatches - prefill.pending.keys()) + decode.num_others)


def _by_policy(policy: Policy, workers: Sequence[Worker], need: Need, load: Callable[[Worker], int]) -> Worker:
    if policy == "round_robin":
        return sorted(workers, key=lambda w: w.id)[need.turn % len(workers)]
    if policy == "sticky" and need.session:
        return _sticky(workers, need)
    if policy == "prefix":
        return min(workers, key=lambda w: (-w.match_prefix(need.hashes), load(w), _turn(w, need)))
    return min(workers, key=lambda w: (load(w), _turn(w, need)))


def _first(need: Need) -> bytes | None:
    """Who has not even this one has none of the prompt's blocks."""
    return need.hashes[0] if need.hashes else None


def _shares_left(workers: Sequence[Worker], need: Need) -> list[float]:
    """Room left on each, as the smaller share of rows and of blocks, once this sequence is there; and something for what it has cached."""
    shares, hashes, first, num_tokens = [], need.hashes, _first(need), need.num_tokens
    for worker in workers:
        needed, cached = -(-num_tokens // worker.block_size), worker.match_prefix(hashes) if first in worker.cached else 0
        rows = 1 - (len(worker.dispatches) + worker.num_others + 1) / worker.max_num_seqs
        blocks = (worker.blocks_reported - worker.pending_blocks + cached - needed) / worker.num_blocks
        share = rows if rows < blocks else blocks
        shares.append(share + cached / max(1, needed) * 0.25 if cached else share)
    return shares


def _in_turn(workers: Sequence[Worker], need: Need) -> Worker:
    """Of equals, the one whose turn it is."""
    return workers[0] if len(workers) == 1 else min(workers, key=lambda w: _turn(w, need))


def _sticky(workers: Sequence[Worker], need: Need) -> Worker:
    return max(workers, key=lambda w: blake2b(f"{need.session}\0{w.hello.worker_id}".encode(), digest_size=8).digest())


def _turn(worker: Worker, need: Need) -> int:
    """A tie-break that rotates: the same worker is not always first."""
    return int.from_bytes(blake2b(f"{need.turn}\0{worker.hello.worker_id}".encode(), digest_size=4).digest(), "little")
