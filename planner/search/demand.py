"""What the requests need on average, and what a cluster could serve at best. Pure arithmetic on means: a
bound, never a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ...engine.latency_profile import Profile
from ...traces.request import TraceRequest
from ..simulator.slo import Slo
from .candidates import Candidate, Hardware
from .sketched_request import Arrival

LARGEST_BATCH = 512


@dataclass(frozen=True, slots=True)
class Demand:
    """Means of the requests, in tokens. ``context``: in a sequence's cache while it generates, averaged over
    its tokens."""

    prompt: float  # not counting what an unbounded prefix cache would have
    output: float
    context: float
    reads: float  # pairs per new prompt token

    @classmethod
    def of(cls, requests: Sequence[TraceRequest], block_size: int | None) -> Demand:
        return cls.of_arrivals(arrivals(requests, block_size))

    @classmethod
    def of_arrivals(cls, asked: Sequence[Arrival], longest: float = inf) -> Demand:
        """A prompt of ``longest`` tokens is refused and needs nothing; an answer ends there."""
        n, served = len(asked), [a for a in asked if a.num_prompt < longest]
        outputs = [min(a.num_output, longest - a.num_prompt) for a in served]
        prompt, output = sum(a.num_new for a in served), sum(outputs)
        context = sum(num * (a.num_prompt + num / 2) for a, num in zip(served, outputs, strict=True))
        reads = sum(a.num_new * (a.num_prompt - a.num_new / 2) for a in served)
        return cls(prompt / n, output / n, context / max(output, 1.0), reads / max(prompt, 1.0))


def arrivals(requests: Sequence[TraceRequest], block_size: int | None) -> tuple[Arrival, ...]:
    """The requests, less what one prefix cache without bound would have of their prompts."""
    known: set[int] = set()
    found = []
    for r in requests:
        hits = next((i for i, one in enumerate(r.block_hashes) if one not in known), len(r.block_hashes))
        known.update(r.block_hashes)
        new = max(1, r.num_prompt_tokens - hits * (block_size or 0))
        found.append(Arrival(r.arrival_s, new, r.num_prompt_tokens, r.num_output_tokens))
    return tuple(found)


def bound(candidate: Candidate, hardware: Hardware, demand: Demand, tpot_s: float | None) -> float:
    """Requests a second that no schedule could exceed: every step full, nobody ever waiting."""
    steps, rest = demand.prompt / candidate.max_batch_tokens, max(0.0, demand.output - 1)
    prompts, answers = (defaultdict[str, float](float) for _ in range(2))  # requests a second, by role
    for group, kind in hardware.pools(candidate):
        chunk = float(candidate.max_batch_tokens)
        prompt_s = steps * kind.profile.prefill.seconds(chunk, chunk * demand.reads, 1)
        if group.role == "colocated" and rest:  # a step of prompts has sequences, too
            prompt_s -= steps * kind.profile.once_s
        answer_s = rest * _per_token(kind.profile, group.max_num_seqs, demand, tpot_s)
        prompts[group.role] += group.count / max(prompt_s, 1e-9)
        answers[group.role] += group.count / max(answer_s, 1e-9)
    if not candidate.colocated:
        return min(prompts["prefill"], answers["decode"])
    # what is left by workers of one role; they generate for what they compute
    low, high = 0.0, sum(prompts.values()) * 1.001
    for _ in range(40):
        rate = (low + high) / 2
        left = max(0.0, rate - prompts["prefill"])
        busy = left / prompts["colocated"] + max(left, rate - answers["decode"]) / answers["colocated"]
        low, high = (rate, high) if busy <= 1 else (low, rate)
    return high


def _per_token(profile: Profile, max_num_seqs: int, demand: Demand, tpot_s: float | None) -> float:
    """Seconds of a decode step a sequence, at the best batch that is allowed, fits into the cache, and is not
    too slow."""
    room = int(profile.memory.num_blocks * profile.memory.block_size / max(demand.context, 1.0))
    best, seqs = float("inf"), 1
    while seqs <= min(max_num_seqs, max(room, 1)):
        seconds = profile.decode.seconds(seqs, seqs * demand.context, seqs)
        # not all of a sequence's steps are as slow as the slowest
        if seqs == 1 or tpot_s is None or seconds <= 2 * tpot_s:
            best = min(best, seconds / seqs)
        seqs *= 2
    return best


def largest_batch(profile: Profile, demand: Demand, tpot_s: float | None) -> int:
    """The largest power of two whose decode step meets ``tpot_s`` and fits into the cache; at least 1, at
    most 512."""
    seqs = 1
    while seqs < LARGEST_BATCH:
        larger = 2 * seqs
        fits = larger * demand.context <= profile.memory.num_blocks * profile.memory.block_size
        slow = tpot_s is not None and profile.decode.seconds(larger, larger * demand.context, larger) > tpot_s
        if slow or not fits:
            break
        seqs = larger
    return seqs


def good_alone(request: TraceRequest, hardware: Hardware, max_batch_tokens: int, bounds: Slo) -> bool:
    """Whether some kind of worker would serve this request within its bounds if nothing took time but its own
    steps."""
    prompt, output = request.num_prompt_tokens, request.num_output_tokens
    prefills = [k.profile for k in hardware.kinds if k.prefills and prompt < k.profile.memory.longest]
    decodes = [k.profile for k in hardware.kinds if k.decodes and prompt < k.profile.memory.longest]
    if not prefills or not decodes:
        return False
    known = len(request.block_hashes) > 0  # some of it may be cached
    ttft_s = 0.0 if known else min(_prompt_s(profile, prompt, max_batch_tokens) for profile in prefills)
    tpot_s = min(profile.decode.seconds(1, prompt, 1) for profile in decodes) if output > 1 else 0.0
    most, rest_s = bounds.most(prompt, output), tpot_s * (output - 1)
    return (
        ttft_s <= most.ttft
        and tpot_s <= most.tpot
        and rest_s <= most.tpot_all * output
        and ttft_s + rest_s <= most.e2e
    )


def _prompt_s(profile: Profile, prompt: int, max_batch_tokens: int) -> float:
    seconds = 0.0
    for start in range(0, prompt, max_batch_tokens):
        new = min(max_batch_tokens, prompt - start)
        seconds += profile.prefill.seconds(new, new * start + new * (new + 1) / 2, 1, start)
    return seconds
