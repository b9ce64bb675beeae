"""Gaps between tokens while long prompts come in: what splitting prefill from decode is for.

    python -m splitserve.bench.peers.itl_mix --url http://127.0.0.1:8000 --name splitserve --json ours.json
    # stop it, start the peer on the same cores, then
    python -m splitserve.bench.peers.itl_mix --url http://127.0.0.1:8001 --name vllm --json theirs.json
    python -m splitserve.bench.peers.itl_mix --plot ours.json theirs.json --png itl.png

Requests of 128 prompt tokens, every sixth of 2,048, in one seeded order; each answers with 64 tokens; 8 are
open at any time. A gap is the time between two streamed events of one request. The first of the files plotted
is the one that the others are compared with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...loadgen.report import Sample
from ...loadgen.settings import LoadSettings
from ...loadgen.workload import FIRST_ID, LoadRequest
from ..environment import environment, option_parser, write_record
from .peer import VOCAB_SIZE, served

SHORT, LONG, EVERY = 128, 2048, 6  # prompt tokens; every sixth prompt is a long one
OUTPUT, OPEN = 64, 8
ABOVE_MS = (100, 300, 1000, 3000)


def mixed_requests(count: int, seed: int) -> list[LoadRequest]:
    """``count`` requests with unique prompts; the same seed gives the same ones."""
    rng = np.random.default_rng(seed)
    lengths = [LONG if index % EVERY == EVERY - 1 else SHORT for index in range(count)]
    return [
        LoadRequest(rng.integers(FIRST_ID, VOCAB_SIZE, length).tolist(), OUTPUT, 0.0) for length in lengths
    ]


def gaps_of(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """(seconds since the start of the run at its end, seconds) of each gap between two events of one
    request."""
    return sorted(
        (later, later - earlier) for sample in samples for earlier, later in pairwise(sample.arrivals)
    )


def measure(url: str, count: int, seed: int) -> dict[str, Any]:
    settings = LoadSettings(
        url=url,
        vocab_size=VOCAB_SIZE,
        seed=seed,
        concurrency=OPEN,
        warmup=1,
        prompt_len=str(SHORT),
        timeout_s=900,
    )
    samples, report = served(settings, requests=mixed_requests(count, seed))
    gaps = gaps_of(samples)
    return {
        "load": {
            "requests": count,
            "seed": seed,
            "short": SHORT,
            "long": LONG,
            "long_every": EVERY,
            "output": OUTPUT,
            "open": OPEN,
        },
        "duration_s": report.duration_s,
        "output_tokens_per_s": report.output_tokens_per_s,
        "itl_ms": {name: value * 1e3 for name, value in report.latencies["itl"].items()},
        "gaps_above": {f"{limit} ms": sum(gap * 1e3 > limit for _, gap in gaps) for limit in ABOVE_MS}
        | {"all": len(gaps)},
        "ttft_ms": {name: _ttft_ms(samples, short) for name, short in (("short", True), ("long", False))},
        "gap_ends_s": [round(end, 3) for end, _ in gaps],
        "gaps_ms": [round(gap * 1e3, 2) for _, gap in gaps],
    }


def _ttft_ms(samples: Sequence[Sample], short: bool) -> dict[str, float]:
    times = [
        (one.arrivals[0] - one.start) * 1e3 for one in samples if (one.num_prompt_tokens < LONG) == short
    ]
    return {"p50": float(np.median(times)), "max": max(times)} if times else {}


def summary(result: dict[str, Any]) -> str:
    """A line for a person."""
    itl = result["itl_ms"]
    return (
        f"{result['name']}: inter-token latency p50 {itl['p50']:.0f}, p99 {itl['p99']:.0f}, longest "
        f"{itl['max']:.0f} ms; {result['output_tokens_per_s']:.1f} output tokens/s"
    )


def draw(results: Sequence[dict[str, Any]], png: Path) -> None:
    """Left: each gap when it ended. Right: the share of gaps that were longer than a time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (when, share) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for color, result in zip(("tab:blue", "tab:orange", "tab:green", "tab:red"), results, strict=False):
        gaps = np.array(result["gaps_ms"])
        label = f"{result['name']}\np99 {result['itl_ms']['p99']:,.0f} ms"
        when.scatter(result["gap_ends_s"], gaps, s=5, alpha=0.5, color=color, linewidths=0)
        # the share of gaps at least as long as each, from the shortest up
        longer = 1 - np.arange(len(gaps)) / len(gaps)
        share.plot(longer * 100, np.sort(gaps), color=color, label=label)
    when.set(
        title="every gap between two tokens",
        xlabel="seconds since the start",
        ylabel="milliseconds",
        yscale="log",
    )
    share.set(title="how many gaps are longer", xlabel="% of gaps", xscale="log")
    share.invert_xaxis()
    share.axvline(1, color="gray", linewidth=0.8, linestyle="--")
    share.legend(fontsize="small", loc="upper left")
    for axis in (when, share):
        axis.grid(alpha=0.3)
    load = results[0]["load"]
    figure.suptitle(
        f"{load['open']} open requests; prompts of {load['short']} tokens, every {load['long_every']}th of "
        f"{load['long']:,}"
    )
    figure.savefig(png, format="png", dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--url", help="of the server to measure")
    parser.add_argument("--name", default="server", help="what the server is, with version and options")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--plot", type=Path, nargs="+", metavar="JSON", help="draw these files instead of measuring"
    )
    parser.add_argument("--png", type=Path, help="the plot's file")
    options = parser.parse_args()
    if (options.plot is None) == (options.url is None) or (options.plot is not None and options.png is None):
        parser.error("give --url to measure, or --plot and --png to draw what was measured")
    if options.plot is None:
        result = {
            "environment": environment(),
            "name": options.name,
            **measure(options.url, options.requests, options.seed),
        }
        print(summary(result))
        write_record(options.json, result)
        return
    results = [json.loads(file.read_text()) for file in options.plot]
    if any(result["load"] != results[0]["load"] for result in results):
        raise SystemExit(
            "these files are of different loads; measure them with the same --requests and --seed"
        )
    for result in results:
        times = result["itl_ms"]["p99"] / results[0]["itl_ms"]["p99"]
        print(f"{summary(result)}; p99 {times:.1f} times that of {results[0]['name']}")
    draw(results, options.png)


if __name__ == "__main__":
    main()
