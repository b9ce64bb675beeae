"""Do images stall other clients' tokens? Streams of text run while chats with images come in.

    python -m splitserve.bench.handoff.images --json bench/results/images.json # 5 minutes

By turns a prefill and a decode worker, and two workers of both roles, with a random Qwen3-VL: a text model of
125M and a vision tower of 135M parameters. Two streams of text run; one image after the other of 512 x 512
pixels (256 tokens), all different, is asked about. In milliseconds: the streams' longest gap between two
tokens and their median one; the first token of a chat with an image, and of the same chat again.
"""

from __future__ import annotations

import base64
import io
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from ..environment import environment, option_parser, write_record
from ..live_cluster import live_cluster, words
from ..models import make_random_qwen_vl

ARMS = {"prefill and decode": {}, "two of both roles": {"prefill": 0, "decode": 0, "mixed": 2}}
ROUNDS, IMAGES, STREAMS, SIDE = 2, 6, 2, 512
MAX_MODEL_LEN, REQUEST_S = 4096, 600.0


def picture(seed: int) -> str:
    """Return a data: URL of coarse noise."""
    from PIL import Image

    noise = Image.frombytes("RGB", (32, 32), random.Random(seed).randbytes(3 * 32 * 32))
    file = io.BytesIO()
    noise.resize((SIDE, SIDE)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def ask(url: str, image: str) -> float:
    """Return the seconds to the first token of a chat with an image."""
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "What is it?"}]
    fields = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/chat/completions", json=fields | {"ignore_eos": True}, timeout=REQUEST_S)
    stages = answer.raise_for_status().json()["usage"]["splitserve"]
    return float(stages["queue_s"] + stages["prefill_s"])


def token_times(url: str, seed: int, over: threading.Event) -> Iterator[float]:
    """Yield when each event of a stream of text comes, until ``over``."""
    draw = random.Random(seed)
    while not over.is_set():
        fields = {"model": "m", "prompt": [draw.randrange(300, 30_000) for _ in range(64)], "stream": True}
        fields |= {"max_tokens": MAX_MODEL_LEN - 100, "ignore_eos": True, "temperature": 0}
        with httpx.stream("POST", f"{url}/v1/completions", json=fields, timeout=REQUEST_S) as answer:
            for line in answer.iter_lines():
                if over.is_set():
                    return
                if line.startswith("data: {"):
                    yield time.monotonic()


def measure(url: str, seed: int) -> dict[str, float]:
    over, gaps = threading.Event(), list[list[float]]([] for _ in range(STREAMS))

    def listen(number: int) -> None:
        times = token_times(url, seed + number, over)
        for _ in range(3):  # the first ones come before and in the handoff
            last = next(times)
        for now in times:
            gaps[number].append(now - last)
            last = now

    ask(url, picture(-seed - 1))  # whatever a first request starts up
    threads = [threading.Thread(target=listen, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    while not all(len(each) > 20 for each in gaps):
        time.sleep(0.1)
    first, again = [], []
    for number in range(IMAGES):
        image = picture(seed + number)
        first.append(ask(url, image))
        again.append(ask(url, image))
    over.set()
    for thread in threads:
        thread.join()
    found = [gap for each in gaps for gap in each]
    seconds = {
        "longest_gap_ms": max(found),
        "median_gap_ms": statistics.median(found),
        "image_ttft_ms": statistics.median(first),
        "again_ttft_ms": statistics.median(again),
    }
    return {name: round(1e3 * value, 1) for name, value in seconds.items()}


def main() -> None:
    arguments = option_parser(__doc__, to_json=True).parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "qwen-vl"
        make_random_qwen_vl(model)
        for number in range(ROUNDS):
            for arm, workers in ARMS.items():
                options = words(model=model, served_model_name="m", max_model_len=MAX_MODEL_LEN, **workers)
                with live_cluster(options, Path(folder) / "log") as url:
                    rows.append({"arm": arm, **measure(url, 1000 * number)})
                print(json.dumps(rows[-1]), flush=True)
    write_record(arguments.json, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
