"""One prefill and one decode worker on one card, started by `splitserve up` and asked over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import httpx
import torch

from ...engine.model.weights import Checkpoint
from ...engine.step.decode_graphs import CudaRecorder
from ...loadgen.load import generate_load
from ...loadgen.report import summarize
from ...loadgen.settings import LoadSettings
from ..handoff.exposed import GOAL_FROM_TOKENS, GOAL_OF_TTFT, measure
from ..kernels.engine_figures import BareEngine, run_again
from ..kernels.exact_check import Span, batch_of
from ..live_cluster import live_cluster
from .correctness import interpret
from .line import Line, Place, checked
from .machine import MAX_LEN, model_folder

NEAR = 0.1
"""Standard deviations of the logits by which a served token may be below the best one: bfloat16's noise. A
token from a wrong cache is some 4 below."""
NEAR_OF_FLOAT8 = 1.5  # the same of weights and a cache in float8 beside none


class Sizes(NamedTuple):
    """``exposed``: prompt tokens to requests; ``load``: tokens in and out, and streams at a time."""

    prompts: tuple[int, ...]
    tokens: int
    exposed: dict[int, int]
    load: tuple[int, int]
    streams: tuple[int, ...]
    vocab_size: int


BIG = Sizes(
    (17, 300, 1500, 4000),
    32,
    dict.fromkeys((256, 512, 1024, 2048), 5) | {8192: 3},
    (1024, 128),
    (1, 8, 32),
    30_000,
)
SMALL = Sizes((5, 40), 3, {64: 1}, (16, 4), (1, 2), 300)


def serve(place: Place, mover: str, precision: str = "", ranks: str = "") -> Iterator[Line]:
    """Tokens beside those of one process, the handoff that shows, and a load of several streams.
    ``precision``: of weights and cache, if it is not the model's own; ``ranks``: of the decode worker."""
    interpret(place)
    if place.big and ranks and torch.cuda.device_count() < int(ranks):
        yield Line(f"{mover}: a decode worker on {ranks} GPUs", left_out=True, note="there are fewer")
        return
    sizes, folder = BIG if place.big else SMALL, model_folder(place, "served")
    if not place.big and mover == "cuda_ipc":
        mover = "tcp"
    options, allowed = ["--mover", mover], NEAR
    if precision:
        options += ["--kv-dtype", precision]
        if place.big or find_spec("splitserve.kernels._cpu"):  # a rehearsal without the C++ kernels
            options += ["--quantization", precision]
        mover, allowed = f"{mover}, {precision}", NEAR_OF_FLOAT8
    if ranks:
        options += ["--decode-tensor-parallel-size", ranks, *(["--device", "cuda"] if place.big else [])]
        mover = f"{mover}, {ranks} ranks"
    log = place.work / "logs" / f"serve {mover} cluster.log"
    prompts = drawn_prompts(sizes.prompts, sizes.vocab_size)
    with live_cluster([*common_options(place, folder), *options], log) as url:
        served = [completed(url, prompt, sizes.tokens) for prompt in prompts]
        yield from _exposed(url, mover, sizes)
        yield from _load(url, mover, sizes)
    logged = log.read_text()
    caches = re.findall("KV cache: (.*)", logged)
    yield Line(
        f"{mover}: both workers on one device have a cache", good=len(caches) == 2, note="; ".join(caches)
    )
    for found in dict.fromkeys(re.findall("(?:prefill graphs|kernels): .*", logged)):
        yield Line(f"{mover}: up logs", note=found, headline=True)
    yield _beside_one_process(place, folder, mover, prompts, served, allowed)


def common_options(place: Place, folder: Path) -> list[str]:
    """Of `splitserve up`: all workers on one device."""
    return [
        "--model",
        str(folder),
        "--served-model-name",
        "m",
        "--dtype",
        "bfloat16",
        "--max-model-len",
        str(MAX_LEN),
        "--device",
        "cuda:0" if place.big else "cpu",
        *([] if place.big else ["--kv-cache-gib", "0.1"]),
    ]


def drawn_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def completed(url: str, prompt: list[int], tokens: int) -> list[int]:
    """Greedy token ids."""
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def _exposed(url: str, mover: str, sizes: Sizes) -> Iterator[Line]:
    for length, found in measure(url, sizes.exposed, sizes.vocab_size).items():
        goal = GOAL_OF_TTFT if int(length) >= GOAL_FROM_TOKENS else None
        yield Line(
            f"{mover}: exposed handoff of TTFT, {length} tokens",
            value=found["exposed_of_ttft"],
            unit="share",
            at_most=goal,
            headline=goal is None,
            note=f"{found['exposed_ms']:.2f} ms of TTFT {found['ttft_ms']:.1f} ms",
        )


def _load(url: str, mover: str, sizes: Sizes) -> Iterator[Line]:
    prompt_len, output_len = sizes.load
    for streams in sizes.streams:
        settings = LoadSettings(
            url=url,
            requests=max(4, 2 * streams),
            concurrency=streams,
            prompt_len=str(prompt_len),
            output_len=str(output_len),
            vocab_size=sizes.vocab_size,
            seed=streams,
        )
        report = summarize(*asyncio.run(generate_load(settings)))
        what = f"{mover}, 0.5B, {streams} streams, {prompt_len} in, {output_len} out"
        yield Line(f"{what}: requests that failed", good=not report.num_failed, value=report.num_failed)
        for name in ("ttft", "tpot"):
            times = report.latencies[name]
            note = f"p99 {times['p99'] * 1e3:.2f} ms"
            yield Line(
                f"{what}: {name.upper()} p50", value=times["p50"] * 1e3, unit="ms", headline=True, note=note
            )
        yield Line(f"{what}: output", value=report.output_tokens_per_s, unit="tokens/s", headline=True)


def _beside_one_process(
    place: Place, folder: Path, mover: str, prompts: list[list[int]], served: list[list[int]], allowed: float
) -> Line:
    engine = one_process(place, folder, exact=False)
    gaps = [gap for prompt, ids in zip(prompts, served, strict=True) for gap in _gaps(engine, prompt, ids)]
    best = sum(gap == 0 for gap in gaps)
    note = f"{best} of {len(gaps)} are the very best one"
    return checked(
        f"{mover}: tokens as one process gives them (how far below its best)", max(gaps), allowed, note
    )


def one_process(place: Place, folder: Path, exact: bool) -> BareEngine:
    """The model with the product's kernels, in this process."""
    with Checkpoint(folder) as checkpoint:
        return BareEngine(
            json.loads((folder / "config.json").read_text()),
            torch.device(place.device),
            exact,
            MAX_LEN,
            (1, CudaRecorder() if place.big else run_again),
            num_tokens=MAX_LEN,
            checkpoint=checkpoint,
        )


def _gaps(engine: BareEngine, prompt: list[int], served: list[int]) -> Iterator[float]:
    """How far each served token is below the best one after those served before it, in standard deviations of
    the logits."""
    known, blocks = prompt + served, list(range(-(-(len(prompt) + len(served)) // 64)))
    for end in range(len(prompt), len(known)):
        if end == len(prompt):
            logits = engine.step_logits(batch_of([Span(known, blocks, 0, end)]))[0]
        else:
            logits = engine.decode_logits(batch_of([Span(known, blocks, end - 1, end)]))[0]
        yield float((logits.max() - logits[known[end]]) / logits.std())
