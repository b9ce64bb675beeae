"""The load that the pool controller is tried with: code-like and conversation-like phases in turn, and a
worker to serve it.

The lengths are those of the Azure traces in their means (code: 2,048 in and 28 out; conversation: 1,155 in
and 211 out), made more unlike so that the best ratios lie far apart. The worker is a slow one, in round
numbers, so that few requests load eight of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...engine.latency_profile import HandoffModel, Memory, Piece, Profile, StepModel
from ...planner.simulator.cluster import Cluster, Pool, PoolRole
from ...traces.request import Trace, TraceRequest

NUM_WORKERS = 8
TTFT_S, TPOT_S = 4.0, 0.15


@dataclass(frozen=True, slots=True)
class Phase:
    """Lengths are lognormal about these means, with this coefficient of variation."""

    name: str
    rate: float  # requests a second and worker
    prompt: float
    output: float
    cv: float = 0.6


CODE = Phase("code-like", 0.8, 2600, 30)
CHAT = Phase("conversation-like", 1.0, 500, 300)


def worker(name: str = "round numbers", prefill_factor: float = 1.0) -> Profile:
    """``prefill_factor``: how many times as long its prompts take."""
    f = prefill_factor
    prefill = Piece(curve=((0, 0.036 * f), (512, 0.165 * f), (2048, 0.570 * f)), read_s=6e-9 * f)
    decode = Piece(curve=((1, 0.066), (64, 0.110), (256, 0.270)), read_s=2e-7)
    return Profile(
        name=name,
        memory=Memory(block_size=64, num_blocks=2000, block_bytes=1 << 20, num_layers=8, max_model_len=16384),
        prefill=StepModel(pieces=(prefill,)),
        decode=StepModel(pieces=(decode,)),
        handoff=HandoffModel(put_s=2e-4, bytes_per_s=2e10),
        flip_s=0.1,
        noise_cv=0.03,
    )


def cluster(profile: Profile, prefill: int, decode: int, mixed: int = 0, borrow: bool = False) -> Cluster:
    """Prefill and decode workers may change their roles, or with ``borrow`` help each other instead."""
    counts: dict[PoolRole, int] = {"prefill": prefill, "decode": decode, "colocated": mixed}
    pools = tuple(
        Pool(
            role=role,
            count=count,
            profile=profile,
            flexible=role != "colocated" and not borrow,
            borrow=borrow,
            max_batch_tokens=2048,
            max_num_seqs=128,
        )
        for role, count in counts.items()
        if count
    )
    return Cluster(pools=pools, max_queue=1 << 30)


def load(phases: Sequence[Phase], phase_s: float, seed: int, num_workers: int = NUM_WORKERS) -> Trace:
    """Each phase for ``phase_s`` seconds, with Poisson arrivals, scaled to ``num_workers``."""
    segments = [(phase_s, phase) for phase in phases]
    requests = list(requests_of(segments, num_workers, np.random.default_rng(seed)))
    return Trace("shifting", lambda: iter(requests), None)


def requests_of(
    segments: Sequence[tuple[float, Phase]], num_workers: int, random: np.random.Generator
) -> Iterator[TraceRequest]:
    """Draw the requests of phases that last these seconds, one after the other."""
    begin = 0.0
    for seconds, phase in segments:
        at, end = begin, begin + seconds
        sigma = float(np.sqrt(np.log1p(phase.cv**2)))
        while (at := at + float(random.exponential(1 / (phase.rate * num_workers)))) < end:
            prompt, output = (
                mean * np.exp(random.normal(-(sigma**2) / 2, sigma)) for mean in (phase.prompt, phase.output)
            )
            yield TraceRequest(at, int(np.clip(prompt, 4, 12000)), int(np.clip(output, 2, 3000)))
        begin = end
