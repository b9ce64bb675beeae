"""The load generator's requests: drawn from one seed, or those of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..traces.readers import open_trace
from ..traces.request import TraceRequest
from ..traces.workload.lengths import lengths_at
from .settings import LoadSettings

FIRST_ID = 10  # below it are special tokens in many vocabularies
WORDS = (
    "time", "year", "way", "day", "thing", "world", "life", "hand", "part", "child", "eye", "place", "work",
    "week", "case", "point",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send at ``at_s`` seconds after the start (0 where only the concurrency limits)."""

    prompt: list[int] | str
    num_output_tokens: int
    at_s: float


def planned_requests(settings: LoadSettings) -> list[LoadRequest]:
    """All requests to be measured. Raises TraceError where a trace is wrong."""
    if settings.trace is None:
        return draw_requests(settings, settings.requests, settings.seed)
    most = settings.requests if "requests" in settings.model_fields_set else None
    return list(islice(replayed(settings.trace, settings), most))


def replayed(path: Path, settings: LoadSettings) -> Iterator[LoadRequest]:
    """A trace's requests; the first one starts at 0. What would be longer than ``max_len`` is cut, the prompt
    last."""
    trace = open_trace(path)
    start_s = None
    for index, request in enumerate(trace):
        start_s = request.arrival_s if start_s is None else start_s
        prompt = _prompt(request, trace.block_size or 1, index, settings)[: settings.max_len - 1]
        num_output_tokens = min(request.num_output_tokens, settings.max_len - len(prompt))
        yield LoadRequest(prompt, num_output_tokens, request.arrival_s - start_s)


def _prompt(request: TraceRequest, block_size: int, index: int, settings: LoadSettings) -> list[int]:
    """Token ids: each hashed block's are a function of its hash, the rest belongs to this request alone."""
    num_known = min(len(request.block_hashes) * block_size, request.num_prompt_tokens)
    streams = [np.random.default_rng([settings.seed, 0, one]) for one in request.block_hashes]
    parts = [stream.integers(FIRST_ID, settings.vocab_size, block_size) for stream in streams]
    own = np.random.default_rng([settings.seed, 1, index]).integers(
        FIRST_ID, settings.vocab_size, request.num_prompt_tokens - num_known
    )
    ids: list[int] = np.concatenate([np.concatenate(parts)[:num_known] if parts else own[:0], own]).tolist()
    return ids


def draw_requests(settings: LoadSettings, count: int, seed: int) -> list[LoadRequest]:
    """``count`` requests; the same settings and seed give the same ones."""
    rng = np.random.default_rng(seed)
    prompt_lens = np.clip(
        draw_lengths(settings.prompt_len, count, rng), settings.shared_prefix_len + 1, settings.max_len - 1
    )
    output_lens = np.minimum(draw_lengths(settings.output_len, count, rng), settings.max_len - prompt_lens)
    gaps = rng.exponential(1 / settings.rate, count) if settings.rate else np.zeros(count)
    prefixes = rng.integers(
        FIRST_ID, settings.vocab_size, (settings.num_prefixes, settings.shared_prefix_len)
    )
    chosen = rng.integers(settings.num_prefixes, size=count)
    requests = []
    for index, arrival in enumerate(np.cumsum(gaps) - gaps[0] if count else gaps):
        own = rng.integers(FIRST_ID, settings.vocab_size, prompt_lens[index] - settings.shared_prefix_len)
        ids: list[int] = np.concatenate([prefixes[chosen[index]], own]).tolist()
        prompt = " ".join(WORDS[token % len(WORDS)] for token in ids) if settings.prompts == "text" else ids
        requests.append(LoadRequest(prompt, int(output_lens[index]), float(arrival)))
    return requests


def draw_lengths(spec: str, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Whole lengths of at least 1 from ``N``, ``uniform:LOW,HIGH``, ``normal:MEAN,DEVIATION`` or
    ``lognormal:MEDIAN,SIGMA``."""
    return lengths_at(spec, rng.standard_normal(count))
