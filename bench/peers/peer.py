"""One OpenAI-compatible server under the loads that we compare servers by; with ``--against``, the ratios to
another's figures.

    splitserve up --model /tmp/llama-125m --port 8000 &  # bench/models.py makes the folder
    python -m splitserve.bench.peers.peer --url http://127.0.0.1:8000 --name splitserve --json ours.json
    # stop it, start the peer on the same cores, then
    python -m splitserve.bench.peers.peer --url http://127.0.0.1:8001 --name vllm --json theirs.json \\
        --against ours.json

``--beside URL`` takes TPOT by turns with another server that is up, too: of two runs one after the other the
machine may have slowed one. TTFT is the median of single requests with prompts of 512 and 2048 tokens; TPOT
that of single requests of 512 in and 64 out; throughput is with 8 and with 32 open requests of 256 in and 64
out.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from statistics import median
from typing import Any

from ...loadgen.load import generate_load
from ...loadgen.report import Report, Sample, summarize
from ...loadgen.settings import LoadSettings
from ..environment import environment, option_parser, write_record

LOADS: dict[str, dict[str, Any]] = {
    "single_512": {"prompt_len": "512", "output_len": "64", "concurrency": 1, "requests": 5, "warmup": 1},
    "single_2048": {"prompt_len": "2048", "output_len": "8", "concurrency": 1, "requests": 3, "warmup": 0},
    "concurrent_8": {"prompt_len": "256", "output_len": "64", "concurrency": 8, "requests": 24, "warmup": 0},
    "concurrent_32": {
        "prompt_len": "256",
        "output_len": "64",
        "concurrency": 32,
        "requests": 64,
        "warmup": 0,
    },
}
TURNS = 12
VOCAB_SIZE = 30_000


def measure(
    url: str, loads: list[str], num_requests: list[int] | None = None, reuses_connections: bool = True
) -> dict[str, float]:
    """The figures by name: times in milliseconds, rates in output tokens a second."""
    figures: dict[str, float] = {}
    for seed, name in enumerate(loads):
        report = _run(url, name, seed, num_requests[seed] if num_requests else None, reuses_connections)
        if name.startswith("single"):
            figures[f"ttft_ms_{name[7:]}"] = report.latencies["ttft"]["p50"] * 1e3
        if name == "single_512":
            figures["tpot_ms"] = report.latencies["tpot"]["p50"] * 1e3
        if name.startswith("concurrent"):
            figures[f"tokens_per_s_{name[11:]}"] = report.output_tokens_per_s
            figures[f"itl_p99_ms_{name[11:]}"] = report.latencies["itl"]["p99"] * 1e3
        print({key: round(value, 1) for key, value in figures.items()}, flush=True)
    return figures


def by_turns(url: str, other: str) -> dict[str, float]:
    """Medians of the TPOT of ``url`` and of ``other``, in milliseconds, and of the latter over the former."""
    pairs = []
    for seed in range(TURNS):
        order = (url, other) if seed % 2 else (other, url)
        tpot = {
            at: _run(at, "single_512", 100 + seed, 1, True).latencies["tpot"]["p50"] * 1e3 for at in order
        }
        pairs.append((tpot[url], tpot[other], tpot[other] / tpot[url]))
    names = ("tpot_ms_by_turns", "tpot_ms_by_turns_of_the_other", "times_better_by_turns")
    return {name: median(column) for name, column in zip(names, zip(*pairs, strict=True), strict=True)}


def _run(url: str, name: str, seed: int, num_requests: int | None, reuses_connections: bool) -> Report:
    load = {**LOADS[name], "requests": num_requests or LOADS[name]["requests"]}
    settings = LoadSettings(url=url, vocab_size=VOCAB_SIZE, seed=seed, timeout_s=900, **load)
    return served(settings, reuses_connections=reuses_connections)[1]


def served(settings: LoadSettings, **given: Any) -> tuple[list[Sample], Report]:
    """``given``: as ``generate_load`` takes it. Raises SystemExit where a request fails."""
    samples, duration_s = asyncio.run(generate_load(settings, **given))
    report = summarize(samples, duration_s)
    if report.num_failed:
        raise SystemExit(f"{report.num_failed} of {report.num_requests} requests failed: {report.errors}")
    return samples, report


def ratios(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """How many times better ours are: shorter times, higher rates."""
    better_low = {name: name.split("_")[0] in ("ttft", "tpot", "itl") for name in ours}
    return {
        name: theirs[name] / ours[name] if better_low[name] else ours[name] / theirs[name]
        for name in ours
        if name in theirs
    }


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--name", required=True, help="what the server is, with version and options")
    parser.add_argument(
        "--beside", metavar="URL", help="another server that is up: TPOT of both by turns, too"
    )
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS))
    parser.add_argument("--requests", type=int, nargs="+", help="of each of the loads, for slow servers")
    parser.add_argument(
        "--new-connections",
        action="store_true",
        help="one for each request, for a server that closes them without announcing it (llama.cpp)",
    )
    parser.add_argument(
        "--against", type=Path, help="figures of this script for the other server: print the ratios"
    )
    arguments = parser.parse_args()
    if arguments.requests and len(arguments.requests) != len(arguments.loads):
        parser.error(f"--requests: {len(arguments.requests)} numbers for {len(arguments.loads)} loads")
    figures = measure(arguments.url, arguments.loads, arguments.requests, not arguments.new_connections)
    if arguments.beside:
        figures |= by_turns(arguments.url, arguments.beside)
    result: dict[str, Any] = {"environment": environment(), "name": arguments.name, "figures": figures}
    if arguments.against:
        other = json.loads(arguments.against.read_text())
        result["against"] = other["name"]
        result[f"{other['name']} is better by"] = ratios(other["figures"], result["figures"])
    print(json.dumps(result, indent=2))
    write_record(arguments.json, result)


if __name__ == "__main__":
    main()
