"""How far off are computed profiles (`--profile llama-3.1-70b-fp8@8xh100`)?

1. Steps: the overheads of one engine are fitted to its measured steps and tried on a model, GPU and degree of
   tensor parallelism that the fit has not seen (each left out in turn): vLLM 0.20, splitwise-sim's vLLM of
   2023, DistServe and the vLLM that it measured.
2. Servers: the constants as shipped against AIConfigurator's measured points, each a closed loop of
   clients; TTFT once more with each server left out of the fit of REQUEST_S. Points whose number of clients
   is not known, or whose attention is data parallel, or that span hosts, cannot be asked.

    python -m splitserve.bench.studies.analytic --data ../shared/data --json bench/results/analytic.json
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from math import log
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from ...engine.analytic.content import CURRENT
from ...engine.analytic.gpus import GPUS
from ...engine.analytic.models import MODELS
from ...engine.analytic.shapes import shape_of
from ...engine.analytic.step_times import Machine, Software
from ...engine.latency_profile import StepModel
from ...planner.profile.closed_loop import Run, closed_loop
from ..environment import environment

LLAMA2 = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}


def _plain(layers: int, hidden: int, heads: int, vocabulary: int) -> dict[str, Any]:
    """A model without gated MLPs and without grouped heads."""
    numbers = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return numbers | {"intermediate_size": 4 * hidden, "gated": False, "vocab_size": vocabulary,
                      "tie_word_embeddings": True}  # fmt: skip


CONFIGS = MODELS | {
    "llama2-70b": LLAMA2 | {"intermediate_size": 28672, "vocab_size": 32000},
    "bloom-176b": _plain(70, 14336, 112, 250880),
    "facebook/opt-13b": _plain(40, 5120, 40, 50272),
    "facebook/opt-66b": _plain(64, 9216, 72, 50272),
}
REPOSITORIES = {
    "deepseek-ai/DeepSeek-R1": "deepseek-v3", "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5", "moonshotai/Kimi-K2.5": "kimi-k2",
    "Qwen/Qwen3-32B": "qwen3-32b", "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
}  # fmt: skip
BITS = {"": 16.0, "fp8": 8.0, "fp4": 4.5}
REQUEST_S = 0.06
"""HTTP, tokenizer and queue of the measured servers, per request; fitted to their TTFT."""
STARTED = Software(0.6, 0.75, 0.4, 0.5, 3e-5, 1.2e-5, 1e-3, 1e-5, 2e-3)
AT_MOST = {"compute": 0.95, "memory": 0.95, "attention": 0.9, "links": 1.0}


class Step(NamedTuple):
    """A measured step. ``args``: units, reads, sequences and cached tokens."""

    model: str
    gpu: str
    gpus: int
    role: str
    args: tuple[float, ...]
    seconds: float

    @property
    def group(self) -> str:
        return f"{self.model} {self.gpus}x{self.gpu}"


def models(model: str, gpu: str, gpus: int, bits: float, software: Software) -> dict[str, StepModel]:
    machine = Machine(shape_of(CONFIGS[model]), GPUS[gpu], gpus, bits, software)
    content = {"prefill": machine.prefill(), "decode": machine.decode()}
    return {role: StepModel.model_validate(steps, strict=False) for role, steps in content.items()}


def vllm_steps(data: Path) -> Iterable[Step]:
    for gpus in (1, 2, 4, 8):
        with (data / f"aiconfigurator/steps_qwen3-32b_tp{gpus}.csv").open() as file:
            for row in csv.DictReader(file):
                if row["chunks"]:
                    cached, new = map(int, row["chunks"].split("+"))
                    args = (new, new * cached + new * (new + 1) / 2, 1, cached)
                    yield Step("qwen3-32b", "b200", gpus, "prefill", args, float(row["seconds"]))
                else:
                    seqs, context = int(row["num_seqs"]), int(row["num_context_tokens"])
                    yield Step(
                        "qwen3-32b", "b200", gpus, "decode", (seqs, context, seqs, 0), float(row["seconds"])
                    )


def splitwise_steps(data: Path) -> Iterable[Step]:
    with (data / "splitwise-sim/perf_model_compact.csv").open() as file:
        for row in csv.DictReader(file):
            prompt, batch, output, gpus = (
                int(row[n]) for n in ("prompt_size", "batch_size", "token_size", "tensor_parallel")
            )
            if not row["hardware"].endswith("pcap"):
                where = row["model"], row["hardware"].split("-")[0], gpus
                args = (prompt * batch, batch * prompt * (prompt + 1) / 2, batch, 0)
                yield Step(*where, "prefill", args, float(row["prompt_ms"]) / 1e3)
                args = (batch, batch * (prompt + output / 2), batch, 0)
                yield Step(*where, "decode", args, float(row["token_ms"]) / 1e3)


def distserve_steps(path: Path) -> Iterable[Step]:
    """Its fitted lines, at sizes within what it measured."""
    for model, by_gpus in json.loads(path.read_text()).items():
        for gpus, fitted in by_gpus.items():
            a, b, c = (x / 1e3 for x in fitted["prefill"])
            for n in (64, 128, 256, 512, 1024, 2048):
                yield Step(
                    model, "a100", int(gpus), "prefill", (n, n * (n + 1) / 2, 1, 0), a + b * n + c * n * n
                )
            for n in (1, 8, 32, 64, 128, 256):
                small = n < fitted["decoding_large_small_bs_threshold"]
                a, b, c = (x / 1e3 for x in fitted["decoding_smallbs" if small else "decoding_largebs"])
                for context in (256 * n, 768 * n):
                    yield Step(
                        model, "a100", int(gpus), "decode", (n, context, n, 0), a + b * context + c * n
                    )


def errors(steps: Sequence[Step], software: Software) -> list[float]:
    """Relative errors, by step."""
    known: dict[str, dict[str, StepModel]] = {}
    found = []
    for step in steps:
        if step.group not in known:
            known[step.group] = models(step.model, step.gpu, step.gpus, 16, software)
        found.append(known[step.group][step.role].seconds(*step.args) / step.seconds - 1)
    return found


def fit(steps: Sequence[Step], rounds: int = 25) -> Software:
    """Constants with the least mean logarithm of the ratio, all groups alike; coordinate descent."""

    def loss(software: Software) -> float:
        by: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for step, error in zip(steps, errors(steps, software), strict=True):
            by[step.group, step.role].append(abs(log(1 + error)))
        return mean(map(mean, by.values()))

    best, software = loss(STARTED), STARTED
    names = [name for name, value in asdict(STARTED).items() if value and name != "sharpness"]
    widths = dict.fromkeys(names, 0.4)
    for _ in range(rounds):
        for name in names:
            for factor in (1 + widths[name], 1 / (1 + widths[name])):
                value = min(getattr(software, name) * factor, AT_MOST.get(name, 1.0))
                moved = replace(software, **{name: value})
                if (its := loss(moved)) < best - 1e-6:
                    best, software = its, moved
                    widths[name] *= 1.2
                    break
            else:
                widths[name] *= 0.55
    return software


def held_out(steps: Sequence[Step]) -> dict[str, Any]:
    """Median errors of the fit to all, and of each group by the constants fitted to the other groups."""
    software = fit(steps)
    pairs = {"fitted": list(zip(steps, errors(steps, software), strict=True)), "held_out": []}
    for group in sorted({step.group for step in steps}):
        unseen = [step for step in steps if step.group == group]
        others = fit([step for step in steps if step.group != group])
        pairs["held_out"] += zip(unseen, errors(unseen, others), strict=True)
    medians = {
        f"{name}_{role}": median(abs(error) for step, error in found if step.role == role)
        for name, found in pairs.items()
        for role in ("prefill", "decode")
    }
    return {"steps": len(steps), "constants": asdict(software)} | medians


def servers(data: Path) -> list[dict[str, Any]]:
    """AIConfigurator's points beside ours; errors are relative."""
    found: dict[str, dict[str, Any]] = {}
    with (data / "aiconfigurator/silicon_refs.csv").open() as file:
        for row in csv.DictReader(file):
            gpu, model = row["system"].split("_")[0], REPOSITORIES.get(row["model_path"])
            clients, gpus = (int(float(row[n] or 0)) for n in ("batch_size", "tp_size"))
            alone = row["mode"] == "agg" and float(row["attention_dp_size"] or 1) == 1 and gpus <= 8
            if not alone or model is None or gpu not in GPUS or "_c_" in row["id"]:
                continue
            prompt, output = int(row["isl"]), int(row["osl"])
            ttft, tpot = (float(row[f"silicon_{n}_ms"]) / 1e3 for n in ("ttft", "tpot"))
            steps = models(model, gpu, gpus, BITS[row["precision"]], CURRENT)
            run = Run(prompt, output, clients, ttft, tpot)
            mixes = row["backend"] != "sglang"
            our_ttft, our_tpot = closed_loop(steps["prefill"], steps["decode"], run, mixes=mixes)
            our_ttft += REQUEST_S
            name = f"{row['backend']} {model} {row['precision'] or 'bf16'} {gpus}x{gpu}"
            name += f" {prompt}/{output} c{clients}"
            if name in found and found[name]["ttft_s"] == ttft:
                continue  # the same measurement is there twice
            found[name] = {
                "point": name,
                "ttft_s": ttft,
                "tpot_s": tpot,
                "ttft_error": our_ttft / ttft - 1,
                "tpot_error": our_tpot / tpot - 1,
                "throughput_error": (ttft + (output - 1) * tpot) / (our_ttft + (output - 1) * our_tpot) - 1,
            }
    return list(found.values())


def left_out_ttft(points: Sequence[dict[str, Any]]) -> float:
    """Median error of TTFT where REQUEST_S is fitted to the other servers only."""

    def error(point: dict[str, Any], request_s: float) -> float:
        ours = (1 + point["ttft_error"]) * point["ttft_s"] - REQUEST_S + request_s
        return float(abs(ours / point["ttft_s"] - 1))

    def unseen(one: dict[str, Any]) -> float:
        others = [point for point in points if point is not one]
        grid = (0.005 * i for i in range(80))
        return error(one, min(grid, key=lambda s: median(error(point, s) for point in others)))

    return median(map(unseen, points))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the published data")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args()
    data: Path = arguments.data
    sources = {
        "vllm 0.20 (AIConfigurator)": vllm_steps(data),
        "vllm 2023 (splitwise-sim)": splitwise_steps(data),
        "distserve": distserve_steps(data / "distserve/profiler-a100-80g.distserve.json"),
        "vllm (DistServe's)": distserve_steps(data / "distserve/profiler-a100-80g.vllm.json"),
    }
    by_source = {name: held_out([*steps]) for name, steps in sources.items()}
    shipped = [*vllm_steps(data)]
    points = servers(data)
    medians = {
        name: median(abs(point[f"{name}_error"]) for point in points)
        for name in ("ttft", "tpot", "throughput")
    }
    left_out = left_out_ttft(points)
    record = {
        "environment": environment(),
        "steps": by_source,
        "servers": points,
        "servers_median": medians,
        "servers_ttft_left_out": left_out,
        "shipped": asdict(CURRENT),
        "shipped_steps_median": median(map(abs, errors(shipped, CURRENT))),
    }
    for name, found in by_source.items():
        print(name, {key: round(value, 3) for key, value in found.items() if key != "constants"})
    for point in points:
        print(point["point"], *(f"{n} {point[f'{n}_error']:+.0%}" for n in medians))
    print(
        {name: round(value, 3) for name, value in medians.items()},
        "TTFT with the server left out",
        round(left_out, 3),
        "shipped steps",
        record["shipped_steps_median"],
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
