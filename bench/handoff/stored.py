"""What the KV store saves where prompts return that no cache holds any more: time to their first token.

    python -m splitserve.bench.handoff.stored --json bench/results/stored.json # 8 minutes
    python -m splitserve.bench.handoff.stored --kv-store s3://BUCKET/PREFIX    # of an object store

Documents of 1,500 tokens are asked about in turn, by a random 125M model; each worker's cache holds two of
them. Four arms in turn: no store; a store; a store that earlier workers have filled; and caches that hold all
documents, which is the limit. The times are medians over all questions of later passes, in milliseconds.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx

from ..environment import environment, option_parser, write_record
from ..live_cluster import live_cluster, words
from ..models import make_random_llama

NUM_DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 8, 1500, 30, 8
ARMS = ("computed", "stored", "after a restart", "cached")
PASSES, ROUNDS = 3, 3
SMALL, LARGE = 220, 2000  # blocks of 16 tokens in each worker's cache
MAX_MODEL_LEN = 2048


def ask(url: str, document: int, draw: random.Random) -> tuple[float, int]:
    """Return (seconds to the first token, prompt tokens that were cached) of a question about a document."""
    words_of = random.Random(document)
    prompt = [words_of.randrange(3, 30_000) for _ in range(DOCUMENT_TOKENS)]
    prompt += [draw.randrange(3, 30_000) for _ in range(QUESTION_TOKENS)]
    fields = {"model": "m", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=fields, timeout=600).raise_for_status().json()
    stages, details = answer["usage"]["splitserve"], answer["usage"]["prompt_tokens_details"]
    return stages["queue_s"] + stages["prefill_s"], details["cached_tokens"]


def measure(url: str, first_pass_counts: bool) -> dict[str, Any]:
    """Return the medians over the questions of all passes that count."""
    draw, asked = random.Random(int(first_pass_counts)), list[tuple[float, int]]()  # other questions
    for number in range(PASSES):
        answers = [ask(url, document, draw) for document in range(NUM_DOCUMENTS)]
        asked += answers if number or first_pass_counts else []
    seconds, cached = zip(*asked, strict=True)
    return {"ttft_ms": 1e3 * statistics.median(seconds), "cached_tokens": statistics.median(cached)}


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--kv-store", help="bucket; each round takes a prefix below it. Default: a folder")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "llama-125m"
        make_random_llama(model, max_position_embeddings=MAX_MODEL_LEN)
        for number in range(arguments.rounds):
            store = f"{arguments.kv_store or folder}/store-{number}"
            for arm in ARMS:
                more: dict[str, object] = {"num_blocks": LARGE if arm == "cached" else SMALL}
                more |= {"kv_store": store} if arm in ("stored", "after a restart") else {}
                more |= {"max_model_len": MAX_MODEL_LEN, "insecure": True}
                options = words(model=model, served_model_name="m", **more)
                with live_cluster(options, Path(folder) / "log") as url:
                    ask(url, NUM_DOCUMENTS, random.Random(2))  # they meet
                    rows.append({"arm": arm, **measure(url, arm == "after a restart")})
                print(rows[-1], flush=True)
    ttft = {arm: statistics.median(r["ttft_ms"] for r in rows if r["arm"] == arm) for arm in ARMS}
    ratios = {arm: ttft[arm] / ttft["computed"] for arm in ARMS}
    print(ttft, ratios)
    write_record(
        arguments.json, {"environment": environment(), "ttft_ms": ttft, "to_computed": ratios, "rows": rows}
    )


if __name__ == "__main__":
    main()
