"""The workloads of validate_live: drawn or from traces, at a rate that loads the busier pool as asked."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...engine.latency_profile import Profile
from ...traces.operators import cut, mean_rate, scaled
from ...traces.own_format import write_trace
from ...traces.readers import open_trace
from ...traces.request import Trace, TraceRequest
from ...traces.workload.arrivals import Arrivals
from ...traces.workload.lengths import MarginalLengths
from ...traces.workload.workload import Workload

WORKLOADS = {  # prompt, output; shares of the longest sequence
    "conversation": ("lognormal:{0},0.8", "lognormal:{0},0.7", 1 / 12, 1 / 24),
    "code": ("lognormal:{0},0.9", "lognormal:{0},0.9", 1 / 6, 1 / 100),
    "even": ("uniform:8,{0}", "uniform:8,{0}", 1 / 6, 1 / 20),
}


def limited(arguments: argparse.Namespace, profile: Profile, workload: str, folder: Path) -> Path:
    """The workload as a file that both replay, at the rate that loads the busier pool as asked."""
    requests = drawn(arguments, profile, workload, arguments.requests)
    lasting = int(arguments.seconds * arguments.load * capacity(arguments, profile, requests))
    if lasting > len(requests):
        requests = drawn(arguments, profile, workload, lasting)
    kept = Trace(workload, lambda: iter(requests))
    rate = arguments.load * capacity(arguments, profile, requests)
    path = folder / f"{workload}.jsonl"
    write_trace(path, scaled(kept, rate / mean_rate(kept)))
    return path


def drawn(arguments: argparse.Namespace, profile: Profile, workload: str, count: int) -> list[TraceRequest]:
    """Requests of the workload, or of the trace with this name."""
    longest = profile.memory.max_model_len
    if arguments.traces:
        trace = cut(
            open_trace(next(path for path in arguments.traces if path.name == workload)), max_requests=count
        )
    else:
        prompt, output, prompt_share, output_share = WORKLOADS[workload]
        lengths = MarginalLengths(
            prompt=prompt.format(int(longest * prompt_share)),
            output=output.format(int(longest * output_share)),
        )
        trace = Workload(arrivals=Arrivals(rate=1.0), lengths=lengths, sessions=None).trace(
            7, max_requests=count
        )
    return [fitting(request, longest) for request in trace]


def fitting(request: TraceRequest, longest: int) -> TraceRequest:
    prompt = min(request.num_prompt_tokens, longest - 2)
    return replace(
        request,
        num_prompt_tokens=prompt,
        num_output_tokens=min(request.num_output_tokens, longest - prompt),
        block_hashes=(),
    )


def capacity(arguments: argparse.Namespace, profile: Profile, requests: Sequence[TraceRequest]) -> float:
    """Requests per second that the busier pool could compute, its steps half full. Mixed workers do what the
    others leave."""
    prompt = float(np.mean([r.num_prompt_tokens for r in requests]))
    output = float(np.mean([r.num_output_tokens for r in requests]))
    tokens, seqs = arguments.max_batch_tokens / 2, arguments.max_num_seqs / 2
    prompt_s = profile.prefill.seconds(tokens, tokens * prompt / 2, 1) * prompt / tokens
    answer_s = profile.decode.seconds(seqs, seqs * (prompt + output / 2), seqs) * output / seqs
    prefill, decode, mixed = arguments.prefill, arguments.decode, arguments.mixed
    return float(
        min(
            (prefill + mixed) / prompt_s,
            (decode + mixed) / answer_s,
            (prefill + decode + mixed) / (prompt_s + answer_s),
        )
    )
