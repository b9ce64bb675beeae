"""Conversations with a long first prompt, then short turns: times to the first token, simulated.

    python -m splitserve.bench.studies.long_turns [--json FILE] # 5 minutes, virtual time

Llama 2 70B on 8 H100s a worker, links of 25 GB/s. A session's first prompt has 3,000 to 9,000 tokens; some
twelve turns of about 100 follow. Simulated workers answer with zeros, and so does a next prompt.
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

from ...coordinator.lifecycle.request import Request
from ...engine.latency_profile import Profile
from ...planner.simulator import simulation
from ...planner.simulator.cluster import Cluster, Pool
from ...planner.simulator.prompts import NO_SINK, sampling
from ...planner.simulator.records import RequestRecord
from ...traces.request import Trace, TraceRequest
from ..environment import environment, option_parser, write_record

CASES: dict[str, tuple[int, int, float, int | None]] = {
    "2 prefill workers, 25/s": (2, 14, 25.0, None),
    "4 prefill workers, 30/s": (4, 16, 30.0, None),
    "2 prefill workers of 700 blocks, 18/s": (2, 12, 18.0, 700),
}
"""Prefill workers, decode workers, requests a second, KV blocks of a prefill worker."""
TURNS, NEW, ANSWER, FIRST, LONGEST, THINK_S, STEP_S = 12, 100, 60, 6000, 14_000, 3.0, 0.035
NUM, SEEDS = 1500, (1, 2)


def conversations(rate: float, draw: random.Random) -> list[tuple[float, list[int], int]]:
    """Return (arrival, prompt, output tokens) of requests in order of arrival."""
    rows: list[tuple[float, list[int], int]] = []
    begin, number = 0.0, 0
    while begin < NUM / rate:
        begin, number, prompt = begin + draw.expovariate(rate / TURNS), number + 1, list[int]()
        at = begin
        for turn in range(max(1, min(40, int(draw.expovariate(1 / TURNS)) + 1))):
            first = int(FIRST * draw.uniform(0.5, 1.5)) if turn == 0 else 0
            new = first or max(8, int(draw.lognormvariate(0, 0.6) * NEW))
            answer = max(4, int(draw.lognormvariate(0, 0.5) * ANSWER))
            prompt = [*prompt, 10_000 + number, turn, *[9] * (new - 2)]
            if len(prompt) + answer > LONGEST:
                break
            rows.append((at, prompt, answer))
            prompt = [*prompt, *[0] * answer]
            at += answer * STEP_S * 1.5 + 0.5 + draw.expovariate(1 / THINK_S)
    return sorted(rows, key=lambda row: row[0])[:NUM]


def measure(name: str, seed: int) -> dict[str, Any]:
    """Return the figures of one run, in milliseconds."""
    num_prefill, num_decode, rate, num_blocks = CASES[name]
    rows = conversations(rate, random.Random(seed))

    def made(number: int, request: TraceRequest, size: int, arrival: float, s: float, most: int) -> Request:
        _, prompt, answer = rows[number]
        return Request(f"r{number}", prompt, sampling(answer), NO_SINK, arrival, arrival + s)

    profile, link = Profile.read(Path("llama2-70b-h100x8")), 25e9
    sizes: dict[str, Any] = {"profile": profile, "link_bytes_per_s": link}
    prefill = Pool(role="prefill", count=num_prefill, max_batch_tokens=2048, num_blocks=num_blocks, **sizes)
    decode = Pool(role="decode", count=num_decode, max_num_seqs=128, **sizes)
    records: list[RequestRecord] = []
    run = simulation.Simulation(Cluster(pools=(prefill, decode)), seed=seed, on_record=records.append)
    trace = Trace("turns", lambda: iter([TraceRequest(at, len(p), n) for at, p, n in rows]))
    with mock.patch.object(simulation, "generation_request", made):
        run.run(trace)
    ttft_ms = sorted(1e3 * record.ttft_s for record in records if record.finished)
    cuts = statistics.quantiles(ttft_ms, n=100)
    figures = {"mean": statistics.mean(ttft_ms), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
    return {"case": name, "seed": seed, "num": len(ttft_ms), "ttft_ms": figures}


def main() -> None:
    arguments = option_parser(__doc__, to_json=True).parse_args()
    rows = []
    for name in CASES:
        for seed in SEEDS:
            rows.append(measure(name, seed))
            print(rows[-1], flush=True)
    write_record(arguments.json, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
