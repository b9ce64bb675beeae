"""Which prefill worker and which decode worker a request goes to: pure functions over a snapshot of the workers.

round_robin   the worker that was chosen longest ago
least_loaded  the least work waiting
prefix        the longest prefix really cached; least loaded among equals
sticky        the worker that the session's name hashes to (rendezvous, so that a lost worker moves only its own sessions)
hybrid        the least time until the prompt is computed: tokens waiting there plus tokens not cached there;
              a session's own worker wins where the difference is under a block

Decode workers are chosen by what the policy means there: the hybrid takes the worker with the most room left after the request,
counting cached blocks as room. Where more than sixteen could be the best, sixteen of them are looked
at in turn (open_workers.py), and all that have the prompt's first block.

A mixed worker generates for what it computes. Where there are any, the decode worker is chosen first; it computes the prompt itself (local
prefill), or a prefill worker does, whichever costs less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from .request import Request
from .worker import Worker

Policy = Literal["hybrid", "round_robin", "least_loaded", "prefix", "sticky"]


@dataclass(frozen=True, slots=True)
class Need:
    """What is routed: how long it is; the hash of its first full block, without which nobody has any of it, and on demand of all of them;
    its session (may be empty); how often anything was routed."""

    num_tokens: int
    first: bytes | None
    hashes: Callable[[], list[bytes]]
    session: str
    turn: int

    @classmethod
    def of(cls, request: Request, worker: Worker, turn: int) -> Need:
        """Return what is to be placed, among workers of this one's kind."""
        return cls(request.num_tokens, request.first_hash(worker), lambda: request.hashes(worker), request.session, turn)


def choose_prefill(policy: Policy, workers: Sequence[Worker], need: Need) -> Worker:
    """The prefill worker for this prompt, of one or more."""
    if len(workers) == 1:
        return workers[0]
    if policy == "hybrid":
        cached = [_num_cached(w, need) * w.block_size for w in workers]
        costs = [need.num_tokens - tokens + w.pending_tokens for tokens, w in zip(cached, workers, strict=True)]
        best = min(costs)
        near = [(cost, w) for cost, w in zip(costs, workers, strict=True) if cost - best < w.block_size]
        if need.session:
            return _sticky([w for _, w in near], need)
        return _in_turn([w for cost, w in near if cost == best], need)
    return _by_policy(policy, workers, need, lambda w: w.pending_tokens)


def choose_decode(policy: Policy, workers: Sequence[Worker], need: Need) -> Worker:
    """The decode worker for this sequence, of one or more."""
    if len(workers) == 1:
        return workers[0]
    if policy == "hybrid":
        shares = [_share_left(w, need) for w in workers]
        most = max(shares)
        return _in_turn([w for share, w in zip(shares, workers, strict=True) if share == most], need)
    return _by_policy(policy, workers, need, lambda w: len(w.dispatches) + w.num_others)


def that_fit(prefills: list[Worker], decodes: list[Worker]) -> tuple[list[Worker], list[Worker]]:
    """Those of either role that fit one of the other: what a prefill worker computes may go to any decode worker of its kind, but from a
    mixed one to itself alone."""
    kinds, processes = {d.kind for d in decodes}, {(d.kind, d.hello.process) for d in decodes}
    prefills = [p for p in prefills if ((p.kind, p.hello.process) in processes if p.hello.mixed else p.kind in kinds)]
    kinds = {p.kind for p in prefills if not p.hello.mixed}
    processes = {(p.kind, p.hello.process) for p in prefills if p.hello.mixed}
    return prefills, [d for d in decodes if d.kind in kinds or (d.kind, d.hello.process) in processes]


def that_hold(num_tokens: int, candidates: list[Worker], open_workers: Iterable[Worker]) -> list[Worker]:
    """Candidates that can hold a sequence of this length. All, where no open worker can: the sequence then ends early, with ``length``."""
    if not any(w.max_model_len >= num_tokens for w in open_workers):
        return candidates
    return [w for w in candidates if w.max_model_len >= num_tokens]


def choose_pair(policy: Policy, prefills: Sequence[Worker], decodes: Sequence[Worker], need: Need) -> tuple[Worker, Worker]:
    """Where some are mixed. Each of ``decodes`` fits one of ``prefills`` at least."""
    decode = choose_decode(policy, decodes, need)
    local = next((w for w in prefills if _are_one(w, decode)), None)
    others = [w for w in prefills if not w.hello.mixed and w.kind == decode.kind]
    if local is None:
        return choose_prefill(policy, others, need), decode
    if not others:
        return local, decode
    remote = choose_prefill(policy, others, need)
    return (local if _cost_there(local, decode, need) <= _cost(remote, need) else remote), decode


def _are_one(prefill: Worker, decode: Worker) -> bool:
    return prefill.hello.mixed and prefill.hello.process == decode.hello.process


def _cost(prefill: Worker, need: Need) -> int:
    """Tokens that are computed until this prompt is."""
    return prefill.pending_tokens + need.num_tokens - _num_cached(prefill, need) * prefill.block_size


def _cost_there(prefill: Worker, decode: Worker, need: Need) -> int:
    """The same on a mixed worker. Every sequence that it generates for waits as long as the prompt's steps take."""
    cost = _cost(prefill, need)
    return cost + (cost - prefill.pending_tokens) * (len(decode.dispatches - prefill.pending.keys()) + decode.num_others)


def _by_policy(policy: Policy, workers: Sequence[Worker], need: Need, load: Callable[[Worker], int]) -> Worker:
    if policy == "round_robin":
        return sorted(workers, key=lambda w: w.id)[need.turn % len(workers)]
    if policy == "sticky" and need.session:
        return _sticky(workers, need)
    turn = _turns(need)
    if policy == "prefix":
        return min(workers, key=lambda w: (-_num_cached(w, need), load(w), turn(w)))
    return min(workers, key=lambda w: (load(w), turn(w)))


def _num_cached(worker: Worker, need: Need) -> int:
    """How many of its leading blocks this worker has."""
    return worker.match_prefix(need.hashes()) if need.first in worker.cached else 0


def _share_left(worker: Worker, need: Need) -> float:
    """Room left there, as the smaller share of rows and of blocks, once this sequence is there; and something for what it has cached."""
    needed, cached = worker.blocks_for(need.num_tokens), _num_cached(worker, need)
    share = worker.share_left(needed - cached)
    return share + cached / max(1, needed) * 0.25 if cached else share


def _in_turn(workers: Sequence[Worker], need: Need) -> Worker:
    """Of equals, the one whose turn it is."""
    return workers[0] if len(workers) == 1 else min(workers, key=_turns(need))


def _sticky(workers: Sequence[Worker], need: Need) -> Worker:
    return max(workers, key=lambda w: blake2b(f"{need.session}\0{w.hello.worker_id}".encode(), digest_size=8).digest())


def _turns(need: Need) -> Callable[[Worker], bytes]:
    """A tie-break that rotates: the same worker is not always first."""
    begun = blake2b(f"{need.turn}\0".encode(), digest_size=4)

    def turn(worker: Worker) -> bytes:
        digest = begun.copy()
        digest.update(worker.name)
        return digest.digest()[::-1]

    return turn
