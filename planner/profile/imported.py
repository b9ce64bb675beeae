"""Profiles from others' measurements: single steps, or whole benchmarks of a server.

What a file lacks (KV cache, handoff, power) is another profile's, ``like``: a shipped or computed one. So is
the shape of the step times where the file has too few steps to fit: they are then scaled.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import log
from pathlib import Path
from statistics import mean, median
from typing import Any

from ...engine.latency_profile import Profile, Residuals, StepModel
from ...engine.step_log import LoggedStep
from ..errors import ProfilingError
from .closed_loop import Run, closed_loop
from .fit import StepPoint, fit_steps, relative_residuals, residuals

FEWEST = 12
"""Kinds of steps of a role that a fit needs; fewer only scale the other profile."""
HELD_OUT = 5
"""Every fifth kind of step is not fitted to, and tests the fit."""
FORWARD = {"sum_prefill_tokens", "num_prefill_requests", "sum_prefill_kv_tokens", "latency_ms"}
"""Columns of AIConfigurator's forward-pass metrics."""
OPERATORS = (
    "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm",
    "mlp_up_proj", "mlp_act", "mlp_down_proj", "add",
)  # fmt: skip
"""Vidur's names of a layer's operators beside attention."""
Rows = list[dict[str, str]]


def imported(path: Path, like: Profile) -> tuple[Profile, list[str]]:
    """A profile from a file or a folder of files, whose content decides the format; and sentences about it.
    Raises ProfilingError."""
    files = sorted(p for p in path.iterdir() if p.suffix in (".csv", ".json")) if path.is_dir() else [path]
    try:
        if {"mlp.csv", "attention.csv"} <= {file.name for file in files}:
            return _from_steps(path, _vidur(path, like), like)
        runs = [run for file in files if file.suffix == ".json" for run in [_benchmark(file)]]
        tables = [_rows(file) for file in files if file.suffix == ".csv"]
        runs += [run for rows in tables if _is_table_of_runs(rows) for run in map(_run, rows)]
        if runs:
            return _from_runs(path, runs, like)
        return _from_steps(path, [step for rows in tables for step in _steps(rows)], like)
    except (OSError, KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ProfilingError(f"{path}: {what}; docs/planning.md lists the formats and columns") from None


# --- steps -------------------------------------------------------------------------------------------


def _from_steps(path: Path, steps: Sequence[LoggedStep], like: Profile) -> tuple[Profile, list[str]]:
    words, models = [], dict[str, StepModel]()
    if not steps:
        raise ValueError("it holds no steps and no benchmarks")
    for role in ("prefill", "decode"):
        points = _points(role, steps)
        before: StepModel = getattr(like, role)
        if not points:
            words.append(f"{role}: no steps of this role alone; those of {like.name} are kept")
            models[role] = before
            continue
        ratios = sorted(p.seconds / before.seconds(p.units, p.reads, p.seqs, p.cached) for p in points)
        least, most = (ratios[round(share * (len(ratios) - 1))] for share in (0.05, 0.95))
        words.append(
            f"{role}: {len(points)} kinds of steps take {median(ratios):.2f} times as long as by {like.name} "
            f"(90% of them {least:.2f} to {most:.2f})"
        )
        if len(points) < FEWEST:
            scaled = before.times(median(ratios))
            models[role] = scaled.model_copy(
                update={"residuals": residuals(scaled, points), "held_out": None}
            )
            words.append(f"{role}: fewer than {FEWEST} kinds of steps: {like.name} was scaled")
            continue
        unseen = points[HELD_OUT // 2 :: HELD_OUT]
        seen = [p for p in points if p not in unseen]
        fitted = fit_steps(seen, _knots([p.units for p in seen]))
        models[role] = fitted.model_copy(update={"held_out": residuals(fitted, unseen)})
        words.append(f"{role} steps that were not fitted to: off by {models[role].mean_error:.1%} on average")
    return _made(path, like, f"steps of {path.name}", models), words


def _knots(units: Iterable[float]) -> list[float]:
    """Measured units, each a quarter above the one before it at least: where a curve may bend."""
    found = list[float]()
    for one in sorted(units):
        if not found or one >= 1.25 * found[-1]:
            found.append(one)
    return found


def _points(role: str, steps: Iterable[LoggedStep]) -> list[StepPoint]:
    """The median of each kind of step; steps with prompts and sequences are left out."""
    kinds: defaultdict[tuple[float, ...], list[float]] = defaultdict(list)
    for step in steps:
        chunks = [(int(c), int(n)) for c, _, n in (chunk.partition("+") for chunk in step.chunks.split())]
        if role == "prefill" and chunks and not step.num_seqs:
            pairs = sum(n * c + n * (n + 1) / 2 for c, n in chunks)
            kinds[sum(n for _, n in chunks), pairs, len(chunks), sum(c for c, _ in chunks)].append(
                step.seconds
            )
        elif role == "decode" and step.num_seqs and not chunks:
            context = round(step.num_context_tokens, -2) or step.num_context_tokens
            kinds[step.num_seqs, context, step.num_seqs, 0].append(step.seconds)
    ordered = sorted((kind, median(seconds)) for kind, seconds in kinds.items() if median(seconds) > 0)
    return [StepPoint(kind[0], kind[1], kind[2], seconds, kind[3]) for kind, seconds in ordered]


def _steps(rows: Rows) -> Iterable[LoggedStep]:
    """Rows of a step log, of any table with its columns, or of AIConfigurator's forward-pass metrics."""
    for row in rows:
        if row.keys() >= FORWARD:
            new, prompts, cached = (int(row[n]) for n in ("sum_prefill_tokens", "num_prefill_requests",
                                                          "sum_prefill_kv_tokens"))  # fmt: skip
            if prompts <= 1:
                chunks = f"{cached}+{new}" if prompts else ""
                seqs, context = int(row["num_decode_requests"]), int(row["sum_decode_kv_tokens"])
                yield LoggedStep(0.0, float(row["latency_ms"]) / 1e3, chunks, seqs, context)
        else:
            seqs, context = (int(row.get(n) or 0) for n in ("num_seqs", "num_context_tokens"))
            yield LoggedStep(0.0, float(row["seconds"]), row.get("chunks") or "", seqs, context)


def _vidur(folder: Path, like: Profile) -> list[LoggedStep]:
    """Sum its operators' medians over the layers, and the sums over GPUs where all_reduce.csv is there."""
    layers, gpus = like.memory.num_layers, like.gpus
    mlp = [r for r in _rows(folder / "mlp.csv") if int(r["num_tensor_parallel_workers"]) == gpus]
    if not mlp:
        raise ProfilingError(
            f"{folder / 'mlp.csv'} has no rows for {gpus} GPUs, which a worker of {like.name} spans"
        )
    others = {int(r["num_tokens"]): sum(_ms(r, name) for name in OPERATORS) for r in mlp}
    sums = _all_reduce(folder / "all_reduce.csv", gpus)
    hidden = int(mlp[0]["n_embd"])
    steps = []
    for row in _rows(folder / "attention.csv"):
        if int(row["num_tensor_parallel_workers"]) != gpus:
            continue
        is_prefill = row["is_prefill"] == "True"
        batch, cached = int(float(row["batch_size"])), int(float(row["kv_cache_size"]))
        tokens = int(float(row["prefill_chunk_size"])) if is_prefill else batch
        if (is_prefill and batch != 1) or tokens == 0:
            continue
        attention_ms = _ms(row, "attn_prefill" if is_prefill else "attn_decode") + _ms(
            row, "attn_kv_cache_save"
        )
        layer_ms = _between(others, tokens) + attention_ms + 2 * sums(2 * tokens * hidden)
        chunks, seqs = (f"{cached}+{tokens}", 0) if is_prefill else ("", batch)
        steps.append(LoggedStep(0.0, layers * layer_ms / 1e3, chunks, seqs, seqs * cached))
    return steps


def _all_reduce(path: Path, gpus: int) -> Callable[[float], float]:
    """Milliseconds of a sum over the GPUs, by its bytes."""
    if gpus == 1 or not path.exists():
        return lambda _: 0.0
    known = {int(r["size"]): _ms(r, "all_reduce") for r in _rows(path) if int(r["num_workers"]) == gpus}
    return lambda size: _between(known, size)


def _between(known: dict[int, float], x: float) -> float:
    """Linear between what is known, constant beyond."""
    below, above = (max((k for k in known if k <= x), default=min(known)),
                    min((k for k in known if k >= x), default=max(known)))  # fmt: skip
    return (
        known[below] + (known[above] - known[below]) * (x - below) / (above - below)
        if above != below
        else known[below]
    )


def _ms(row: dict[str, str], name: str) -> float:
    return float(row.get(f"time_stats.{name}.median") or 0.0)


# --- whole benchmarks ----------------------------------------------------------------------------------


def _from_runs(path: Path, runs: list[Run], like: Profile) -> tuple[Profile, list[str]]:
    """Scale each role's steps by the factor with the least mean logarithm of the ratios of TTFT and TPOT."""

    def ratios(factors: tuple[float, float]) -> list[tuple[float, float]]:
        prefill, decode = like.prefill.times(factors[0]), like.decode.times(factors[1])
        found = [closed_loop(prefill, decode, run) for run in runs]
        return [(ttft / run.ttft_s, tpot / run.tpot_s) for (ttft, tpot), run in zip(found, runs, strict=True)]

    def loss(factors: tuple[float, float]) -> float:
        return mean(abs(log(ratio)) for pair in ratios(factors) for ratio in pair)

    best, width = (1.0, 1.0), 0.5
    least = loss(best)
    while width > 0.01:
        p, d = best
        near = [(p * f, d) for f in (1 + width, 1 / (1 + width))] + [
            (p, d * f) for f in (1 + width, 1 / (1 + width))
        ]
        losses = {one: loss(one) for one in near}
        one = min(losses, key=lambda o: losses[o])
        best, least, width = (one, losses[one], width) if losses[one] < least else (best, least, width / 2)
    found = ratios(best)
    words = [
        f"prompt steps take {best[0]:.2f} times as long as by {like.name}, steps of sequences {best[1]:.2f} "
        f"times; fitted to {len(runs)} benchmarks of a server"
    ]
    models = dict[str, StepModel]()
    for i, (role, name) in enumerate((("prefill", "TTFT"), ("decode", "TPOT"))):
        off: Residuals = relative_residuals([(pair[i], 1.0) for pair in found])
        models[role] = (
            getattr(like, role).times(best[i]).model_copy(update={"residuals": off, "held_out": None})
        )
        words.append(f"{name}: off by {off.mean:.1%} on average, {off.worst:.1%} at worst")
    return _made(path, like, f"{len(runs)} benchmarks of {path.name}", models), words


def _is_table_of_runs(rows: Rows) -> bool:
    return bool(rows) and {"isl", "osl"} <= rows[0].keys()


def _run(row: dict[str, str]) -> Run:
    """A row of a table such as AIConfigurator's: isl, osl, concurrency or batch_size, TTFT and TPOT in ms."""
    clients = row.get("concurrency") or row.get("batch_size") or row["bs"]
    ttft, tpot = (
        float(row.get(name) or row.get(f"{name}_ms") or row[f"silicon_{name}_ms"])
        for name in ("ttft", "tpot")
    )
    return Run(int(row["isl"]), max(2, int(row["osl"])), int(float(clients)), ttft / 1e3, tpot / 1e3)


def _benchmark(path: Path) -> Run:
    """A result of `vllm bench serve --save-result` or of genai-perf.

    Where it lacks the number of clients, that follows from throughput and latency (Little's law)."""
    content: dict[str, Any] = json.loads(path.read_bytes())
    if "time_to_first_token" in content:
        means = {name: float(value["avg"]) for name, value in content.items()
                 if isinstance(value, dict) and "avg" in value}  # fmt: skip
        prompt, output = means["input_sequence_length"], means["output_sequence_length"]
        ttft, tpot, rate = (
            means["time_to_first_token"],
            means["inter_token_latency"],
            means["request_throughput"],
        )
        stimulus = content.get("input_config", {}).get("perf_analyzer", {}).get("stimulus", {})
        clients = stimulus.get("concurrency")
    else:
        completed = content["completed"]
        prompt, output = content["total_input_tokens"] / completed, content["total_output_tokens"] / completed
        ttft, tpot, rate = content["mean_ttft_ms"], content["mean_tpot_ms"], content["request_throughput"]
        clients = content.get("max_concurrency")
    life_s = (ttft + tpot * (output - 1)) / 1e3
    return Run(
        round(prompt),
        max(2, round(output)),
        int(clients or max(1, round(rate * life_s))),
        ttft / 1e3,
        tpot / 1e3,
    )


# --- both ------------------------------------------------------------------------------------------------


def _made(path: Path, like: Profile, source: str, models: dict[str, StepModel]) -> Profile:
    update = {"name": path.stem, "source": f"{source}; all else as {like.name}", "noise_cv": 0.0}
    return like.model_copy(update=update | models)


def _rows(path: Path) -> Rows:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
