"""The load generator's requests: lengths, prompts and arrival times, all drawn from one seed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .settings import LoadSettings

FIRST_ID = 10  # below it are special tokens in many vocabularies
WORDS = ("time", "year", "way", "day", "thing", "world", "life", "hand", "part", "child", "eye", "place", "work", "week", "case", "point")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send at ``at_s`` seconds after the start (0 where only the concurrency limits)."""

    prompt: list[int] | str
    num_output_tokens: int
    at_s: float


def draw_requests(settings: LoadSettings, count: int, seed: int) -> list[LoadRequest]:
    """``count`` requests; the same settings and seed give the same ones."""
    rng = np.random.default_rng(seed)
    prompt_lens = np.clip(draw_lengths(settings.prompt_len, count, rng), settings.shared_prefix_len + 1, settings.max_len - 1)
    output_lens = np.minimum(draw_lengths(settings.output_len, count, rng), settings.max_len - prompt_lens)
    gaps = rng.exponential(1 / settings.rate, count) if settings.rate else np.zeros(count)
    prefixes = rng.integers(FIRST_ID, settings.vocab_size, (settings.num_prefixes, settings.shared_prefix_len))
    chosen = rng.integers(settings.num_prefixes, size=count)
    requests = []
    for index, arrival in enumerate(np.cumsum(gaps) - gaps[0] if count else gaps):
        own = rng.integers(FIRST_ID, settings.vocab_size, prompt_lens[index] - settings.shared_prefix_len)
        ids: list[int] = np.concatenate([prefixes[chosen[index]], own]).tolist()
        prompt = " ".join(WORDS[token % len(WORDS)] for token in ids) if settings.prompts == "text" else ids
        requests.append(LoadRequest(prompt, int(output_lens[index]), float(arrival)))
    return requests


def draw_lengths(spec: str, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Whole lengths of at least 1 from ``N``, ``uniform:LOW,HIGH``, ``normal:MEAN,DEVIATION`` or ``lognormal:MEDIAN,SIGMA``."""
    if ":" not in spec:
        return np.full(count, max(1, int(spec)))
    kind, numbers = spec.split(":")
    first, second = (float(number) for number in numbers.split(","))
    match kind:
        case "uniform":
            drawn = rng.integers(int(first), int(second) + 1, count).astype(float)
        case "normal":
            drawn = rng.normal(first, second, count)
        case _:
            drawn = first * np.exp(second * rng.standard_normal(count))
    lengths: NDArray[np.int64] = np.maximum(1, np.rint(drawn)).astype(np.int64)
    return lengths
