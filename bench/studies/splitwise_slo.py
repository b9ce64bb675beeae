"""Splitwise's nine service levels (ISCA'24, Table VI): slowdowns against an uncontended DGX-A100 with the
same model, all strictly below.

    TTFT   2 / 3 / 6          TBT and E2E   1.25 / 1.5 / 5          at p50 / p90 / p99

As in its notebooks the reference is prompt_time(prompt tokens) for TTFT, token_time(prompt tokens) for TBT,
and for E2E their sum over all tokens but the first; TBT is (E2E - TTFT) / output tokens.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from ...engine.latency_profile import Piece, StepModel
from .splitwise_machine import Job

LIMITS = {"ttft": (2.0, 3.0, 6.0), "tbt": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}
PERCENTS = (50, 90, 99)


def splitwise_curves(
    path: Path, model: str, hardware: str, tensor_parallel: int
) -> tuple[StepModel, StepModel]:
    """splitwise-sim's own reading of its measurements, for comparisons with its results: medians over prompt
    * batch tokens, both for prompts and for decode steps; it asks the latter for a number of *sequences*, and
    so gets nearly one time for all."""
    wanted = model, hardware, str(tensor_parallel)
    with path.open(encoding="utf-8") as file:
        rows = [
            r for r in csv.DictReader(file) if (r["model"], r["hardware"], r["tensor_parallel"]) == wanted
        ]
    if not rows:
        raise SystemExit(f"{path} has no rows for {wanted}")
    by_tokens: defaultdict[int, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        by_tokens[int(row["prompt_size"]) * int(row["batch_size"])].append(row)

    def model_of(column: str) -> StepModel:
        curve = tuple(
            (float(tokens), median(float(r[column]) for r in by_tokens[tokens]) / 1e3)
            for tokens in sorted(by_tokens)
        )
        return StepModel(pieces=(Piece(curve=curve),))

    return model_of("prompt_time"), model_of("token_time")


class NineSlos:
    """The nine service levels of one model."""

    def __init__(self, perf_model: Path, model: str) -> None:
        self._prompt, self._token = splitwise_curves(perf_model, model, "a100-80gb", 8)
        self._known: dict[int, tuple[float, float]] = {}

    def slowdowns(self, jobs: Sequence[Job]) -> dict[str, tuple[float, ...]]:
        """At ``PERCENTS``, by quantity."""
        ratios: dict[str, list[float]] = {name: [] for name in LIMITS}
        for job in jobs:
            prompt_s, token_s = self._reference(job.num_prompt_tokens)
            ratios["ttft"].append(job.ttft / prompt_s)
            ratios["tbt"].append((job.e2e - job.ttft) / job.num_output_tokens / token_s)
            ratios["e2e"].append(job.e2e / (prompt_s + token_s * (job.num_output_tokens - 1)))
        return {
            name: tuple(float(p) for p in np.percentile(values, PERCENTS)) for name, values in ratios.items()
        }

    def missed(self, jobs: Sequence[Job], num_asked: int) -> list[str]:
        """Which of the nine are not met; what was never done counts as the slowest."""
        if len(jobs) < num_asked:
            return [f"{num_asked - len(jobs)} never done"]
        return [
            f"{name}_p{percent}"
            for name, values in self.slowdowns(jobs).items()
            for percent, value, limit in zip(PERCENTS, values, LIMITS[name], strict=True)
            if value >= limit
        ]

    def _reference(self, num_prompt_tokens: int) -> tuple[float, float]:
        if num_prompt_tokens not in self._known:
            times = (
                self._prompt.seconds(num_prompt_tokens, 0, 1),
                self._token.seconds(num_prompt_tokens, 0, 1),
            )
            self._known[num_prompt_tokens] = times
        return self._known[num_prompt_tokens]
