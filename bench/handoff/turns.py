"""What it saves to pull the KV blocks of earlier answers: time to the first token of a conversation's turns.

    python -m splitserve.bench.handoff.turns --json bench/results/turns.json # 9 minutes

Two clusters in turn, each with one prefill and one decode worker and a random 125M model: one pulls, one
computes (``--min-pull-tokens 0``). A turn adds 60 tokens to all that was before; the answer has 300. A user
waits a second before the next turn. The times are medians over all turns but the first, in milliseconds.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from ..environment import environment, option_parser, write_record
from ..live_cluster import live_cluster, words
from ..models import make_random_llama

ARMS = {"pulls": 128, "computes": 0}
USERS = (1, 4)
ROUNDS, TURNS = 3, 6
NEW_TOKENS, ANSWER_TOKENS, THINK_S = 60, 300, 1.0
MAX_MODEL_LEN = 4096


def converse(url: str, seed: int) -> list[tuple[float, int]]:
    """Return (seconds to the first token, prompt tokens that were cached) of each turn."""
    draw, prompt, found = random.Random(seed), list[int](), list[tuple[float, int]]()
    for _ in range(TURNS):
        prompt += [draw.randrange(3, 30_000) for _ in range(NEW_TOKENS)]
        fields = {"model": "m", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        fields |= {"temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=fields, timeout=600).raise_for_status().json()
        stages = answer["usage"]["splitserve"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        found.append((stages["queue_s"] + stages["prefill_s"], cached))
        prompt += answer["choices"][0]["token_ids"]
        time.sleep(THINK_S)
    return found


def measure(url: str, users: int, seed: int) -> dict[str, Any]:
    """Return the medians over later turns, with this many conversations at a time."""
    with ThreadPoolExecutor(users) as pool:
        turns = list(pool.map(lambda user: converse(url, seed + user)[1:], range(users)))
    seconds = [seconds for turn in turns for seconds, _ in turn]
    cached = [cached for turn in turns for _, cached in turn]
    return {"ttft_ms": 1e3 * statistics.median(seconds), "cached_tokens": statistics.median(cached)}


def main() -> None:
    arguments = option_parser(__doc__, to_json=True).parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "llama-125m"
        make_random_llama(model, max_position_embeddings=MAX_MODEL_LEN)
        for number in range(ROUNDS):
            for arm, least in ARMS.items():
                options = words(
                    model=model, served_model_name="m", max_model_len=MAX_MODEL_LEN, min_pull_tokens=least
                )
                with live_cluster(options, Path(folder) / "log") as url:
                    converse(url, 0)  # they meet
                    for users in USERS:
                        row = {"arm": arm, "users": users, **measure(url, users, 100 * number + users)}
                        rows.append(row)
                        print(row, flush=True)
    medians = {f"{arm}, {users}": _median(rows, arm, users) for users in USERS for arm in ARMS}
    ratios = {str(u): _median(rows, "pulls", u) / _median(rows, "computes", u) for u in USERS}
    print(medians, ratios)
    record = {"environment": environment(), "ttft_ms": medians, "pulls_to_computes": ratios, "rows": rows}
    write_record(arguments.json, record)


def _median(rows: list[dict[str, Any]], arm: str, users: int) -> float:
    found: float = statistics.median(r["ttft_ms"] for r in rows if (r["arm"], r["users"]) == (arm, users))
    return found


if __name__ == "__main__":
    main()
