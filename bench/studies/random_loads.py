"""Random loads for the pool controller, each drawn from its number: phases of 10 to 600 s, drifts, bursts,
windows of real traces, constant loads. Rates are such that the best ratio for the present requests has room;
at times it has not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from ...engine.latency_profile import Profile
from ...steering.capacity import Capacity
from ...steering.load_watch import LoadPicture
from ...steering.options import SteeringOptions
from ...traces.operators import cut
from ...traces.readers import open_trace
from ...traces.request import TraceRequest
from .steer_workload import TPOT_S, TTFT_S, Phase, requests_of, worker

NUM_WORKERS = 4
OPTIONS = SteeringOptions(TTFT_S, TPOT_S, mode="act")
KINDS = ("10-30 s", "30-90 s", "90-600 s", "drift", "bursts", "several mixes", "trace", "constant")
TRACES = (
    ("azure/AzureLLMInferenceTrace_conv.csv", "azure/AzureLLMInferenceTrace_code.csv"),
    ("mooncake/conversation_trace.jsonl.gz",),
    (
        "servegen/servegen_m-small_10rps_1800s_seed0.csv.gz",
        "servegen/servegen_deepseek-r1_4rps_1800s_seed0.csv.gz",
    ),
)
PART_S = 30.0  # the oracle's shortest
TRACE_S = 240.0


@dataclass(frozen=True, slots=True)
class RandomLoad:
    """``parts``: (end in seconds, requests) in order of time."""

    number: int
    kind: str
    prefill: int  # workers at the beginning
    requests: tuple[TraceRequest, ...]
    parts: tuple[float, ...]  # ends of the oracle's parts, in seconds


@cache
def small_worker() -> Profile:
    """The worker of ``steer_workload`` with two layers: fewer events."""
    made = worker()
    return made.model_copy(update={"memory": made.memory.model_copy(update={"num_layers": 2})})


def drawn(number: int, data: Path | None = None) -> RandomLoad | None:
    """Return the load of this number; None: it is of a trace, and there is no ``data``."""
    random = np.random.default_rng([number, 20_251])
    kind = KINDS[number % len(KINDS)]
    if kind == "trace":
        if data is None:
            return None
        requests = _of_trace(data, random, number // len(KINDS))
        ends = [TRACE_S / 4 * i for i in range(1, 5)]
    else:
        segments = list(_segments(kind, random))
        requests, ends = tuple(requests_of(segments, NUM_WORKERS, random)), list(_ends(segments))
    begins = NUM_WORKERS // 2 if random.random() < 0.5 else _best(_picture(requests))[0]
    return RandomLoad(number, kind, begins, requests, tuple(ends))


def _segments(kind: str, random: np.random.Generator) -> Iterator[tuple[float, Phase]]:
    a, b = _mix(random), _mix(random)
    if kind == "constant":
        yield 150.0, a
    elif kind == "drift":
        for share in np.linspace(0, 1, 40):
            mean = {
                name: float(np.exp((1 - share) * np.log(getattr(a, name)) + share * np.log(getattr(b, name))))
                for name in ("prompt", "output")
            }
            yield 6.0, _loaded(replace(a, **mean), 0.85)  # type: ignore[arg-type]
    elif kind == "bursts":
        quiet, burst = _loaded(a, random.uniform(0.4, 0.7)), _loaded(b if random.random() < 0.6 else a, 1.5)
        for _ in range(5):
            yield random.uniform(20, 60), quiet
            yield random.uniform(4, 20), burst
    else:
        shortest, longest, span_s = {
            "10-30 s": (10, 30, 200.0), "30-90 s": (30, 90, 260.0), "90-600 s": (90, 600, 500.0),
            "several mixes": (10, 120, 260.0),
        }[kind]  # fmt: skip
        mixes = [a, b] if kind != "several mixes" else [a, b, _mix(random), _mix(random)]
        at, turn = 0.0, 0
        while at < span_s:
            lasts = float(np.exp(random.uniform(np.log(shortest), np.log(longest))))
            yield lasts, mixes[turn % len(mixes)]
            at, turn = at + lasts, turn + 1


def _mix(random: np.random.Generator) -> Phase:
    prompt, output = (float(np.exp(random.uniform(*np.log(span)))) for span in ((250, 3500), (25, 450)))
    return _loaded(Phase("", 1.0, prompt, output, random.uniform(0.3, 1.0)), random.uniform(0.5, 1.0))


def _loaded(phase: Phase, load: float) -> Phase:
    """The same lengths, at the rate at which the best ratio has this load."""
    mean, output = phase.prompt, phase.output
    picture = LoadPicture(100, 1.0, mean, mean * mean / 2, output, mean + output / 2, phase.cv**2)
    return replace(phase, rate=float(np.clip(load / _best(picture)[1] / NUM_WORKERS, 0.1, 3.0)))


def _best(picture: LoadPicture) -> tuple[int, float]:
    """Return the ratio with the least load, in prefill workers, and its load."""
    prefill, pressure = Capacity(small_worker(), OPTIONS, 2048, 128).best(picture, NUM_WORKERS)
    return prefill, pressure.worst


def _picture(requests: tuple[TraceRequest, ...]) -> LoadPicture:
    """The mean of a whole load, at one request a second."""
    prompts = np.array([r.num_prompt_tokens for r in requests], float)
    output = float(np.mean([r.num_output_tokens for r in requests]))
    mean = float(prompts.mean())
    return LoadPicture(
        100,
        1.0,
        mean,
        float((prompts**2).mean() / 2),
        output,
        mean + output / 2,
        float(prompts.var()) / mean**2,
    )


def _ends(segments: list[tuple[float, Phase]]) -> Iterator[float]:
    at = since = 0.0
    for seconds, _ in segments:
        at += seconds
        if at - since >= PART_S:
            yield at
            since = at


def _of_trace(data: Path, random: np.random.Generator, turn: int) -> tuple[TraceRequest, ...]:
    """A window of a source's trace, its lengths and its rate scaled to these workers; of two files, one after
    the other in turns."""
    files = TRACES[turn % len(TRACES)]
    lasts = TRACE_S / len(files) / (2 if len(files) > 1 else 1)
    found: list[TraceRequest] = []
    windows = []
    for name in files:
        every = [r for r in _whole(data / name) if r.num_output_tokens]
        start = random.uniform(0, max(1.0, every[-1].arrival_s - 600))
        later = [r for r in every if r.arrival_s >= start]
        windows.append([replace(r, arrival_s=r.arrival_s - start, block_hashes=()) for r in later])
    for i in range(round(TRACE_S / lasts)):
        mine = windows[i % len(files)]
        begun = i // len(files) * lasts
        factor = min(1.0, 1500 / float(np.mean([r.num_prompt_tokens for r in mine[:500]])))
        picture = _picture(tuple(_shrunk(r, factor) for r in mine[:500]))
        rate = random.uniform(0.5, 0.95) / _best(picture)[1]
        speed = rate / (len(mine[:500]) / (mine[:500][-1].arrival_s - mine[0].arrival_s + 1e-9))
        part = [replace(_shrunk(r, factor), arrival_s=r.arrival_s / speed - begun) for r in mine]
        found += [replace(r, arrival_s=r.arrival_s + i * lasts) for r in part if 0 <= r.arrival_s < lasts]
    return tuple(sorted(found, key=lambda r: r.arrival_s))


@cache
def _whole(path: Path) -> tuple[TraceRequest, ...]:
    return tuple(cut(open_trace(path, disorder_s=60.0, drop_empty=True), max_requests=40_000))


def _shrunk(request: TraceRequest, factor: float) -> TraceRequest:
    prompt = int(np.clip(request.num_prompt_tokens * factor, 4, 12000))
    return replace(request, num_prompt_tokens=prompt, num_output_tokens=min(request.num_output_tokens, 1500))
