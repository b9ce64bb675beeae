"""Checks the trace tools against published traces, and records what they find.

    python -m splitserve.bench.traces --data ../shared/data --json bench/results/traces.json

The folder holds ``azure/``, ``mooncake/`` and ``servegen/`` as published. Two things are recorded for each
trace: the figures measured on it before, by other code, beside ours, which must agree to the last digit given
(percentiles: to one token, as their definitions differ by a neighbour; else the exit status is 1); and the
statistics of a workload drawn from the trace's fit: with
steps of 10 s, and with a single gamma process for all of it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ..traces.readers import open_trace
from ..traces.request import Trace
from ..traces.statistics import TraceStatistics, describe
from ..traces.workload.fit import fit
from .environment import environment, option_parser, write_record

FIT_STEPS_S = {"steps of 10 s": 10.0, "one gamma process": 1e6}
COLUMNS = (
    *("requests", "span_s", "rate", "iat_cv", "peak_1s", "peak_60s"),
    *(f"{side}_{what}" for side in ("prompt", "output") for what in ("mean", "p50", "p90", "p99", "max")),
    *("correlation", "reuse_percent", "distinct_blocks", "distinct_arrivals"),
)
PERCENTILES = ("p50", "p90", "p99")
PUBLISHED = {  # as text, which keeps the number of digits
    "azure/AzureLLMInferenceTrace_code.csv": (
        "8819 3436 2.57 13.2 67 585 2048 1469 5188 7436 7437 28 13 55 252 1899 0.00 - - -"
    ),
    "azure/AzureLLMInferenceTrace_conv.csv": (
        "19366 3502 5.53 1.09 19 502 1155 1020 2735 4142 14050 211 129 424 601 1000 -0.11 - - -"
    ),
    "mooncake/conversation_trace.jsonl.gz": (
        "12031 3537 3.40 - - - 12035 6909 27367 85400 126195 343 350 597 1119 2000 - 36.6 182790 1180"
    ),
    "mooncake/synthetic_trace.jsonl.gz": (
        "3993 1022 3.91 - - - 15325 11587 38611 66456 191378 149 69 389 768 893 - 64.0 43924 -"
    ),
    "servegen/servegen_deepseek-r1_4rps_1800s_seed0.csv.gz": (
        "7177 1800 3.99 - - - 1632 357 3003 25567 44318 1003 501 1492 12793 26866 - - - -"
    ),
    "servegen/servegen_m-small_10rps_1800s_seed0.csv.gz": (
        "17992 1800 10.0 - - - 123 51 398 1353 9216 17 4 52 144 443 - - - -"
    ),
}


def figures(statistics: TraceStatistics) -> dict[str, float | None]:
    """Our value for every column."""
    blocks = statistics.blocks
    lengths = [
        value
        for side in (statistics.prompt, statistics.output)
        for value in (side.mean, side.p50, side.p90, side.p99, float(side.max))
    ]
    values = (
        *(statistics.num_requests, statistics.span_s, statistics.mean_rate, statistics.iat_cv),
        *(statistics.peak[1], statistics.peak[60], *lengths, statistics.correlation),
        blocks.reuse * 100 if blocks and blocks.reuse is not None else None,
        blocks.num_distinct_blocks if blocks else None,
        statistics.num_distinct_arrivals,
    )
    return dict(zip(COLUMNS, values, strict=True))


def agrees(column: str, ours: float | None, published: str) -> bool:
    """Equal to the last digit given, however halves are rounded; percentiles to one token."""
    digits = len(published.partition(".")[2])
    allowed = 1.0 if column.endswith(PERCENTILES) else 0.5 * 10**-digits
    return ours is not None and abs(ours - float(published)) <= allowed * (1 + 1e-9)


def check(folder: Path, name: str) -> dict[str, Any]:
    """One trace: published figures beside ours, its reading rate, and its fits."""
    trace = open_trace(folder / name)
    start = time.process_time()
    statistics = _statistics(trace)
    read_s = time.process_time() - start
    ours = figures(statistics)
    published = {
        column: text for column, text in zip(COLUMNS, PUBLISHED[name].split(), strict=True) if text != "-"
    }
    wrong = [column for column, text in published.items() if not agrees(column, ours[column], text)]
    for column in wrong:
        print(f"{name}: {column} is {ours[column]}, published is {published[column]}", file=sys.stderr)
    print(f"{name}: {len(published) - len(wrong)} of {len(published)} published figures agree", flush=True)
    return {
        "agree": len(published) - len(wrong),
        "of": len(published),
        "published": published,
        "ours": ours,
        "statistics": statistics.as_json(),
        "requests_per_cpu_s": statistics.num_requests / read_s,
        "drawn from the fit": {
            label: _drawn(trace, statistics, step_s) for label, step_s in FIT_STEPS_S.items()
        },
    }


def _drawn(trace: Trace, statistics: TraceStatistics, step_s: float) -> dict[str, Any]:
    workload = fit(trace, step_s)
    return {
        "cv": workload.arrivals.cv,
        "statistics": _statistics(workload.trace(0, duration_s=statistics.span_s)).as_json(),
    }


def _statistics(trace: Trace) -> TraceStatistics:
    found = describe(trace)
    assert found is not None, trace.name
    return found[0]


def main() -> int:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of the published traces")
    arguments = parser.parse_args()
    traces = {name: check(arguments.data, name) for name in PUBLISHED}
    write_record(arguments.json, {"environment": environment(), "traces": traces})
    return int(any(trace["agree"] < trace["of"] for trace in traces.values()))


if __name__ == "__main__":
    sys.exit(main())
