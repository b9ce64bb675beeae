"""What the KV handoff adds after the last layer: exposed seconds by prompt length.

    python -m splitserve.bench.handoff.exposed --json bench/results/exposed.json # 4 minutes
    python -m splitserve.bench.handoff.exposed --lengths 512 --movers shm        # a short one

It starts its own cluster with a random 125M model for each row.

Exposed time is from the first token (the prompt is computed) to the moment the sequence joins the decode
batch: the stage ``handoff_s`` that every answer reports. One request at a time. The goal is at most 2% of
TTFT from 2,048 prompt tokens on.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx

from ..environment import environment, option_parser, write_record
from ..live_cluster import live_cluster, words
from ..models import make_random_llama

MOVERS = ("shm", "tcp")
LENGTHS = {512: 5, 2048: 3, 8192: 2}  # prompt tokens: requests
GOAL_FROM_TOKENS, GOAL_OF_TTFT = 2048, 0.02
MAX_MODEL_LEN = 8192 + 64
REQUEST_S = 600.0


def measure(url: str, lengths: dict[int, int], vocab_size: int = 30_000) -> dict[str, Any]:
    """Medians by prompt length, in milliseconds."""
    draw = random.Random(0)

    def ask(length: int) -> dict[str, float]:
        return _stages(url, [draw.randrange(3, vocab_size) for _ in range(length)])

    ask(min(lengths))  # whatever a first request starts up
    figures = {}
    for length, count in lengths.items():
        stages = [ask(length) for _ in range(count)]
        ttft = statistics.median(s["queue_s"] + s["prefill_s"] for s in stages)
        exposed = statistics.median(s["handoff_s"] for s in stages)
        figures[str(length)] = {
            "ttft_ms": ttft * 1e3,
            "exposed_ms": exposed * 1e3,
            "exposed_of_ttft": exposed / ttft,
        }
    return figures


def _stages(url: str, prompt: list[int]) -> dict[str, float]:
    fields = {"model": "m", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=fields, timeout=REQUEST_S)
    answer.raise_for_status()
    stages: dict[str, float] = answer.json()["usage"]["splitserve"]
    return stages


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument(
        "--lengths", type=int, nargs="+", choices=LENGTHS, default=list(LENGTHS), help="prompt tokens"
    )
    parser.add_argument("--movers", nargs="+", choices=MOVERS, default=list(MOVERS))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "llama-125m"
        make_random_llama(model, max_position_embeddings=MAX_MODEL_LEN)
        for mover in arguments.movers:
            options = words(model=model, served_model_name="m", mover=mover, max_model_len=MAX_MODEL_LEN)
            with live_cluster(options, Path(folder) / "log") as url:
                figures = measure(url, {length: LENGTHS[length] for length in arguments.lengths})
            rows.append({"mover": mover, "by_prompt_tokens": figures})
            print(json.dumps(rows[-1], indent=1), flush=True)
    record = {"environment": environment(), "goal_met": goal_met(rows), "rows": rows}
    write_record(arguments.json, record)


def goal_met(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return whether the goal is met at each length that it is for, by mover."""
    return {
        row["mover"]: all(
            f["exposed_of_ttft"] <= GOAL_OF_TTFT
            for length, f in row["by_prompt_tokens"].items()
            if int(length) >= GOAL_FROM_TOKENS
        )
        for row in rows
    }


if __name__ == "__main__":
    main()
