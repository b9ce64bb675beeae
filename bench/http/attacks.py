"""Attacks over HTTP against a server that this command starts, and their cost for it and other clients.

    python -m splitserve.bench.http.attacks [--splitserve PATH] [--only NAME ...] [--times 10] \\
        [--json bench/results/attacks.json]
    python -m splitserve.bench.http.attacks --load-minutes 30        memory under ordinary load

`--splitserve` is the command of any build (a script that runs it will do), so that builds can be compared;
`--label` names its rows in the record. All stays on loopback and ends by itself; a server whose coordinator
exceeds `--most-gb` is killed, and the row notes it.

For each attack: answers by status; memory of the coordinator with its own processes before, at most, and 3 s
after; the longest gap in another client's stream and the slowest /health meanwhile, and the gap without any
attack.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from ..environment import environment, option_parser, write_record
from .attack_kinds import ATTACKS, PATIENCE_S, TEXT, Attack, Target
from .bystander import EVERY_S, beside
from .raw_client import allow_many_files
from .watched_server import Watch, memory_mb, served

QUIET_S = 10.0  # without an attack: the baseline
REST_S = 3.0
STREAM_TOKENS = 1900
MAX_GROWTH_MB = 16.0  # from the second quarter of a load to its last


@dataclass
class Row:
    """MB and seconds."""

    name: str
    label: str
    answers: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    before_mb: float = 0.0
    most_mb: float = 0.0
    after_mb: float = 0.0
    longest_gap_s: float = 0.0
    quiet_gap_s: float = 0.0
    slowest_health_s: float = 0.0
    health_failures: int = 0
    stream_failures: int = 0
    killed: str = ""


def measure(
    attack: Attack, port: int, process: psutil.Process, options: argparse.Namespace, quiet_gap_s: float
) -> Row:
    row = Row(
        attack.name, options.label, quiet_gap_s=round(quiet_gap_s, 3), before_mb=round(memory_mb(process), 1)
    )
    watch = Watch(process, 1000 * options.most_gb)
    with beside(port, STREAM_TOKENS) as bystander:
        bystander.wait()
        watch.start()
        begin = time.monotonic()
        row.answers = dict(sorted(attack.run(Target(port, options.times)).items()))
        row.seconds = round(time.monotonic() - begin, 1)
        time.sleep(2 * EVERY_S)
        _, gap, health, row.health_failures, row.stream_failures = bystander.seen
    watch.stop()
    time.sleep(REST_S)
    row.longest_gap_s, row.slowest_health_s = round(gap, 3), round(health, 3)
    row.most_mb, row.killed = round(watch.most, 1), watch.killed
    row.after_mb = round(memory_mb(process), 1)
    return row


def attacked(attacks: list[Attack], options: argparse.Namespace) -> Iterator[Row]:
    """One server for all with the same bound on files; another one after it was killed."""
    left = sorted(attacks, key=lambda attack: attack.max_files or 0)
    while left:
        max_files = left[0].max_files
        with served(shlex.split(options.splitserve), max_files) as (port, process):
            with beside(port, STREAM_TOKENS) as bystander:
                bystander.wait()
                time.sleep(QUIET_S)
                quiet_gap_s = bystander.seen.longest_gap_s
            while left and left[0].max_files == max_files:
                row = measure(left.pop(0), port, process, options, quiet_gap_s)
                yield row
                if row.killed:
                    break


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Small requests, streams, and large bodies of all kinds from time to time; memory every 5 s."""
    samples: list[float] = []
    large = [
        attack for attack in ATTACKS if attack.name in ("tokenization", "logit_bias", "ids", "message parts")
    ]
    with (
        served(shlex.split(options.splitserve), None) as (port, process),
        beside(port, STREAM_TOKENS) as bystander,
    ):
        deadline, sampled, turn = time.monotonic() + 60 * options.load_minutes, 0.0, 0
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            while time.monotonic() < deadline:
                for i in range(20):
                    client.post(TEXT, json={"prompt": f"{turn} {i} " + "word " * (i * 10), "max_tokens": 8})
                client.post(
                    TEXT, json={"prompt": "x " * 40_000, "truncate_prompt_tokens": 100, "max_tokens": 2}
                )
                if turn % 20 == 0:
                    large[turn // 20 % len(large)].run(Target(port, 1))
                turn += 1
                if time.monotonic() > sampled + 5:
                    sampled = time.monotonic()
                    samples.append(round(memory_mb(process), 1))
        _, gap, health, *failures = bystander.seen
    quarter = max(1, len(samples) // 4)
    early, late = (
        sum(some) / len(some) for some in (samples[quarter : 2 * quarter] or samples, samples[-quarter:])
    )
    figures = {
        "minutes": options.load_minutes,
        "turns": turn,
        "second_quarter_mb": round(early, 1),
        "last_quarter_mb": round(late, 1),
    }
    return {
        **figures,
        "longest_gap_s": round(gap, 3),
        "slowest_health_s": round(health, 3),
        "failures": failures,
        "samples_mb": samples,
    }


def table(rows: list[Row]) -> str:
    lines = [
        "| attack | build | answers | before, most, after MB | longest gap (quiet) s | slowest /health s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        answers = row.killed or ", ".join(f"{count} x {status}" for status, count in row.answers.items())
        health = f"{row.slowest_health_s:.2f}" + (
            f", {row.health_failures} failed" if row.health_failures else ""
        )
        memory = f"{row.before_mb:.0f}, {row.most_mb:.0f}, {row.after_mb:.0f}"
        lines.append(
            f"| {row.name} | {row.label} | {answers} | {memory} | {row.longest_gap_s:.2f} "
            f"({row.quiet_gap_s:.2f}) | {health} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--splitserve", default=f"{sys.executable} -m splitserve.cli", help="the command of the build"
    )
    parser.add_argument("--label", default="now", help="what the record calls it")
    parser.add_argument(
        "--only", nargs="*", choices=[attack.name for attack in ATTACKS], help="these attacks"
    )
    parser.add_argument(
        "--times", type=int, default=10, help="how many times as many clients as first showed the defect"
    )
    parser.add_argument("--most-gb", type=float, default=4.0, help="a coordinator that takes more is killed")
    parser.add_argument(
        "--load-minutes", type=float, help="no attacks: ordinary load, and whether memory stays level"
    )
    parser.add_argument(
        "--json", type=Path, help="put the rows into this record, in place of those of the same label"
    )
    options = parser.parse_args()
    allow_many_files()
    if options.load_minutes:
        result = load(options)
        print(json.dumps(result))
        return 1 if result["last_quarter_mb"] > result["second_quarter_mb"] + MAX_GROWTH_MB else 0
    rows = []
    for row in attacked(
        [attack for attack in ATTACKS if not options.only or attack.name in options.only], options
    ):
        rows.append(row)
        print(json.dumps(asdict(row)), flush=True)
    print(table(rows))
    if options.json:
        record = json.loads(options.json.read_text()) if options.json.exists() else {"rows": []}
        new = {(row.label, row.name) for row in rows}
        kept = [row for row in record["rows"] if (row["label"], row["name"]) not in new]
        record = {"environment": environment(), "rows": [*kept, *map(asdict, rows)]}
        write_record(options.json, record)
    return 1 if any(row.killed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
