"""What could be built from so many workers, and what each could serve at best. Pure arithmetic on means: a bound, never a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...engine.latency_profile import Profile
from ..simulator.cluster import Cluster, Pool, PoolRole
from ..simulator.tallies import Slo
from ..trace.request import TraceRequest


@dataclass(frozen=True, slots=True)
class Candidate:
    """``max_batch_tokens``: the chunk budget of a step's prompts; ``max_num_seqs``: the largest decode batch."""

    prefill: int
    decode: int
    colocated: int
    max_batch_tokens: int
    max_num_seqs: int

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.colocated

    @property
    def ratio(self) -> str:
        """``10P:6D``, or ``16 colocated``."""
        return f"{self.colocated} colocated" if self.colocated else f"{self.prefill}P:{self.decode}D"

    def __str__(self) -> str:
        return f"{self.ratio}, steps of {self.max_batch_tokens} prompt tokens, batches of {self.max_num_seqs}"

    def grown(self, factor: float) -> Candidate:
        """So many times the workers, in about the same ratio."""
        total = -(-round(self.num_workers * factor * 1000) // 1000)
        if self.colocated:
            return replace(self, colocated=total)
        prefill = min(max(1, round(total * self.prefill / self.num_workers)), total - 1)
        return replace(self, prefill=prefill, decode=total - prefill)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Profiles by role; one for both where there is only one kind."""

    prefill: Profile
    decode: Profile

    def cluster(self, candidate: Candidate, max_queue: int) -> Cluster:
        """To be simulated. A worker whose KV cache is divided between two roles is a prefill profile's."""
        counts: tuple[tuple[PoolRole, int, Profile], ...] = (
            ("prefill", candidate.prefill, self.prefill),
            ("decode", candidate.decode, self.decode),
            ("colocated", candidate.colocated, self.prefill),
        )
        pools = [
            Pool(role=role, count=n, profile=of, max_batch_tokens=candidate.max_batch_tokens, max_num_seqs=candidate.max_num_seqs)
            for role, n, of in counts
            if n
        ]
        return Cluster(pools=tuple(pools), max_queue=max_queue)

    def price_per_hour(self, candidate: Candidate) -> float | None:
        """None where a profile knows no price."""
        p, d = self.prefill.price_per_hour, self.decode.price_per_hour
        if p is None or d is None:
            return None
        return (candidate.prefill + candidate.colocated) * p + candidate.decode * d


@dataclass(frozen=True, slots=True)
class Demand:
    """Means of the requests, in tokens. ``context``: in a sequence's cache while it generates, averaged over its tokens."""

    prompt: float  # not counting what an unbounded prefix cache would have
    output: float
    context: float
    reads: float  # pairs per new prompt token

    @classmethod
    def of(cls, requests: Sequence[TraceRequest], block_size: int | None) -> Demand:
        known: set[int] = set()
        prompt = output = context = reads = 0.0
        for r in requests:
            hits = 0
            for one in r.block_hashes:
                if one not in known:
                    break
                hits += 1
            known.update(r.block_hashes)
            new = max(1, r.num_prompt_tokens - hits * (block_size or 0))
            prompt += new
            output += r.num_output_tokens
            context += r.num_output_tokens * (r.num_prompt_tokens + r.num_output_tokens / 2)
            reads += new * (r.num_prompt_tokens - new / 2)
        n = len(requests)
        return cls(prompt / n, output / n, context / max(output, 1.0), reads / max(prompt, 1.0))


def bound(candidate: Candidate, hardware: Hardware, demand: Demand, tpot_s: float | None) -> float:
    """Requests a second that no schedule could exceed: every step full, nobody ever waiting."""
    chunk = float(candidate.max_batch_tokens)
    step_s = hardware.prefill.prefill.seconds(chunk, chunk * demand.reads, 1)
    prefill_s = demand.prompt / chunk * step_s
    decode_s = max(0.0, demand.output - 1) * _per_token(hardware.decode, candidate.max_num_seqs, demand, tpot_s)
    if candidate.colocated:
        alone_s = demand.prompt / chunk * max(0.0, step_s - hardware.prefill.prefill.base_s)
        decode_s = max(0.0, demand.output - 1) * _per_token(hardware.prefill, candidate.max_num_seqs, demand, tpot_s)
        return candidate.colocated / max(alone_s + decode_s, 1e-9)
    return min(candidate.prefill / max(prefill_s, 1e-9), candidate.decode / max(decode_s, 1e-9))


def _per_token(profile: Profile, max_num_seqs: int, demand: Demand, tpot_s: float | None) -> float:
    """Seconds of a decode step a sequence, at the best batch that is allowed, fits into the cache, and is not too slow."""
    room = int(profile.memory.num_blocks * profile.memory.block_size / max(demand.context, 1.0))
    best, seqs = float("inf"), 1
    while seqs <= min(max_num_seqs, max(room, 1)):
        seconds = profile.decode.seconds(seqs, seqs * demand.context, seqs)
        if seqs == 1 or tpot_s is None or seconds <= 2 * tpot_s:  # not all of a sequence's steps are as slow as the slowest
            best = min(best, seconds / seqs)
        seqs *= 2
    return best


def largest_batch(profile: Profile, demand: Demand, tpot_s: float | None) -> int:
    """The largest power of two whose decode step meets ``tpot_s`` and fits into the cache; at least 1, at most 512."""
    seqs = 1
    while seqs < 512:
        larger = 2 * seqs
        fits = larger * demand.context <= profile.memory.num_blocks * profile.memory.block_size
        slow = tpot_s is not None and profile.decode.seconds(larger, larger * demand.context, larger) > tpot_s
        if slow or not fits:
            break
        seqs = larger
    return seqs


def splits(num_workers: int, max_batch_tokens: int, max_num_seqs: int) -> list[Candidate]:
    """All ratios of so many workers."""
    return [Candidate(p, num_workers - p, 0, max_batch_tokens, max_num_seqs) for p in range(1, num_workers)]


def good_alone(request: TraceRequest, hardware: Hardware, max_batch_tokens: int, bounds: Slo) -> bool:
    """Whether this request would be within its bounds if it had the cluster to itself, and nothing took time but steps."""
    prompt, output = request.num_prompt_tokens, request.num_output_tokens
    longest = min(hardware.prefill.memory.max_model_len, hardware.decode.memory.max_model_len)
    if prompt >= longest:
        return False
    known = len(request.block_hashes) > 0  # some of it may be cached
    ttft_s = 0.0
    for start in range(0, 0 if known else prompt, max_batch_tokens):
        new = min(max_batch_tokens, prompt - start)
        ttft_s += hardware.prefill.prefill.seconds(new, new * start + new * (new + 1) / 2, 1, start)
    tpot_s = hardware.decode.decode.seconds(1, prompt, 1) if output > 1 else 0.0
    return (
        (bounds.ttft_s is None or ttft_s <= bounds.ttft_s)
        and (bounds.tpot_s is None or tpot_s <= bounds.tpot_s)
        and (bounds.e2e_s is None or ttft_s + tpot_s * (output - 1) <= bounds.e2e_s)
    )
