"""How far off are computed profiles (`--profile llama-3.1-70b-fp8@8xh100`)?

1. Steps: the overheads of one engine are fitted to its measured steps and tried on a model, GPU and degree of
   tensor parallelism that the fit has not seen (each left out in turn): vLLM 0.20, splitwise-sim's vLLM of
   2023, DistServe and the vLLM that it measured.
2. Servers: the constants as shipped against AIConfigurator's measured points, each a closed loop of
   clients, and by constants chosen on the other models alone. Points whose number of clients is not known,
   whose attention is data parallel, whose weights are int4 or more than the GPUs hold, or that span hosts,
   cannot be asked; nor those whose requests wait longer than their answers take, for rows that the server
   lacks.
   ``--servers``: AIConfigurator's file of all points, systems/silicon_sample.csv; else the 35 of the data.

    python -m splitserve.bench.studies.analytic steps --data ../shared/data --json bench/results/analytic.json
    python -m splitserve.bench.studies.analytic servers --data ../shared/data --servers silicon_sample.csv
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from hashlib import md5
from math import log
from pathlib import Path
from statistics import mean, median
from typing import Any

from ...engine.analytic.content import CURRENT
from ...engine.analytic.shapes import shape_of
from ...engine.analytic.step_times import GPUS, Gpu, Machine, Software
from ...engine.latency_profile import StepModel
from ...planner.profile.closed_loop import REQUEST_S, Run, Server, closed_loop
from ..environment import environment, option_parser, write_record
from .analytic_measured import (
    BITS,
    CONFIGS,
    Measured,
    Point,
    Step,
    distserve_steps,
    measured,
    splitwise_steps,
    vllm_steps,
)

EXPERTS, QUANTISED, REQUESTS = (0.2, 0.3, 0.45), (0.6, 0.75, 0.9), (0.005, 0.015, 0.03, 0.06)
"""What is chosen among for a model that is left out: the share of experts' products, Blackwell's of quantised
ones, REQUEST_S."""
EVERY = 4
"""Each choice is tried on every fourth point."""
STARTED = Software(0.6, 0.75, 0.4, 0.5, 3e-5, 1.2e-5, 1e-3, 1e-5, 2e-3)
AT_MOST = {"compute": 0.95, "memory": 0.95, "attention": 0.9, "links": 1.0}


def models(model: str, gpu: Gpu, gpus: int, bits: float, software: Software) -> dict[str, StepModel]:
    machine = Machine(shape_of(CONFIGS[model]), gpu, gpus, bits, software)
    content = {"prefill": machine.prefill(), "decode": machine.decode()}
    return {role: StepModel.model_validate(steps, strict=False) for role, steps in content.items()}


def errors(steps: Sequence[Step], software: Software) -> list[float]:
    """Relative errors, by step."""
    known: dict[str, dict[str, StepModel]] = {}
    found = []
    for step in steps:
        if step.group not in known:
            known[step.group] = models(step.model, GPUS[step.gpu], step.gpus, 16, software)
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
    fixed = "sharpness", "experts"  # these steps are of dense models
    names = [name for name, value in asdict(STARTED).items() if value and name not in fixed]
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


def load(point: Point) -> tuple[Run, Server]:
    """Return what a benchmark asks, and how the server was started.

    InferenceMAX's lengths lie between 0.8 of the nominal ones and these. AIConfigurator's are all equal, and
    its steps take a prompt and 1,500 tokens more; yet lengths that vary by a tenth meet its runs of vLLM."""
    if point.source == "InferenceMAX":
        run = Run(0.9 * point.prompt, 0.9 * point.output, point.clients, 0, 0)
        short = point.model == "minimax-m2.5" and point.gpu in ("b200", "b300")
        step_tokens = 2 * point.prompt if short else 16_384 if point.backend == "trtllm" else 8192
        return run, Server(step_tokens, point.backend != "sglang", point.backend != "trtllm", 1 / 9)
    step_tokens, spread = point.prompt + 1500 + point.clients, 0.1 if point.backend == "vllm" else 0.0
    llama = point.model == "llama-3.1-8b"
    rows = point.clients - 1 if llama and point.backend == "trtllm" else point.clients
    mixes = llama or point.backend != "sglang"
    server = Server(step_tokens, mixes, point.backend != "trtllm", spread, rows)
    return Run(point.prompt, point.output, point.clients, 0, 0), server


def steps_more(point: Point) -> float:
    """Return how many steps TTFT has besides, by InferenceMAX's scripts: until the tokens that are sent at
    once are there, until the scheduler looks for requests (half its interval), until prompts fill a step."""
    if point.source != "InferenceMAX":
        return 0.0
    if point.model == "deepseek-v3":
        if point.backend != "sglang" or point.gpu not in ("b200", "b300"):
            return 9.0
        return 9.0 + (15.0 if point.clients >= 16 else 5.0)
    waits = point.model == "llama-3.1-70b" and point.backend == "trtllm" and point.gpus < 8
    return 20.0 if waits and point.prompt == point.output == 1024 else 0.0


def server_errors(
    points: Measured, software: Software, quantised: float | None = None
) -> dict[Point, dict[str, float]]:
    """Relative errors of each point beside the median of its runs. ``quantised``: of Blackwell."""
    known = dict[tuple[str, str, int, str], dict[str, StepModel]]()
    found = dict[Point, dict[str, float]]()
    for point, runs in points.items():
        key = point.model, point.gpu, point.gpus, point.precision
        if key not in known:
            gpu = GPUS[point.gpu]
            if quantised is not None and gpu.quantised < 1:
                gpu = replace(gpu, quantised=quantised)
            known[key] = models(point.model, gpu, point.gpus, BITS[point.precision], software)
        ttft, tpot = (median(run[i] for run in runs) for i in (0, 1))
        ours_ttft, ours_tpot = closed_loop(known[key]["prefill"], known[key]["decode"], *load(point))
        ours = ours_ttft + steps_more(point) * ours_tpot, ours_tpot
        lives = [first + (point.output - 1) * other for first, other in ((ttft, tpot), ours)]
        found[point] = {
            "ttft_s": ttft,
            "ttft_error": ours[0] / ttft - 1,
            "tpot_error": ours[1] / tpot - 1,
            "throughput_error": lives[0] / lives[1] - 1,
        }
    return found


def medians(found: Iterable[dict[str, float]]) -> dict[str, float]:
    errors_found = [*found]
    names = "ttft", "tpot", "throughput"
    return {"points": len(errors_found)} | {
        name: median(abs(error[f"{name}_error"]) for error in errors_found) for name in names
    }


def left_out(points: Measured) -> dict[str, dict[str, float]]:
    """Median errors of each model by the constants with the least mean logarithm on the other models."""
    some = {point: points[point] for point in sorted(points)[::EVERY]}
    by_choice = dict[tuple[float, float, float], dict[Point, dict[str, float]]]()
    for experts in EXPERTS:
        for quantised in QUANTISED:
            found = server_errors(some, replace(CURRENT, experts=experts), quantised)
            for request_s in REQUESTS:
                by_choice[experts, quantised, request_s] = {
                    p: e | {"ttft_error": e["ttft_error"] + (request_s - REQUEST_S) / e["ttft_s"]}
                    for p, e in found.items()
                }

    def loss(choice: tuple[float, float, float], model: str) -> float:
        found = by_choice[choice]
        errors_found = (
            e[f"{n}_error"] for p, e in found.items() if p.model != model for n in ("ttft", "tpot")
        )
        return mean(min(1.0, abs(log(max(0.01, 1 + error)))) for error in errors_found)

    result = {}
    for model in sorted({point.model for point in some}):
        choice = min(by_choice, key=lambda c: loss(c, model))
        unseen = [e for p, e in by_choice[choice].items() if p.model == model]
        result[model] = medians(unseen) | dict(
            zip(("experts", "quantised", "request_s"), choice, strict=True)
        )
    unseen = [
        e for model, r in result.items()
        for p, e in by_choice[r["experts"], r["quantised"], r["request_s"]].items() if p.model == model
    ]  # fmt: skip
    return result | {"all": medians(unseen)}


def step_record(data: Path) -> dict[str, Any]:
    sources = {
        "vllm 0.20 (AIConfigurator)": vllm_steps(data),
        "vllm 2023 (splitwise-sim)": splitwise_steps(data),
        "distserve": distserve_steps(data / "distserve/profiler-a100-80g.distserve.json"),
        "vllm (DistServe's)": distserve_steps(data / "distserve/profiler-a100-80g.vllm.json"),
    }
    by_source = {name: held_out([*steps]) for name, steps in sources.items()}
    for name, found in by_source.items():
        print(name, {key: round(value, 3) for key, value in found.items() if key != "constants"})
    return by_source | {"shipped_median": median(map(abs, errors([*vllm_steps(data)], CURRENT)))}


def _chosen_on(point: Point) -> bool:
    """Half of the servers, each with all its lengths and clients: on it Hopper's sums were chosen."""
    return not md5("|".join(map(str, point[:6])).encode()).digest()[0] & 1


def server_record(points: Measured) -> dict[str, Any]:
    """Errors by source, engine and model; of single points where they are few."""
    found = server_errors(points, CURRENT)
    groups = defaultdict[str, list[dict[str, float]]](list)
    for point, error in found.items():
        half = "half chosen on" if _chosen_on(point) else "half not looked at"
        engine = f"{point.source}, {point.backend}"
        for name in ("all", half, engine, point.model, f"{point.clients} clients"):
            groups[name].append(error)
    by_group = {name: medians(of) for name, of in groups.items() if len(of) > 4}
    spread = [
        [max(v) / min(v) - 1 for v in zip(*runs, strict=True)] for runs in points.values() if len({*runs}) > 1
    ]
    record: dict[str, Any] = {"by_group": by_group, "left_out": left_out(points)}
    if spread:
        record["repeated_runs_differ"] = {
            n: median(s[i] for s in spread) for i, n in enumerate(("ttft", "tpot"))
        }
    tpot = sorted(abs(error["tpot_error"]) for error in found.values())
    record["tpot"] = {
        "num_points": len(tpot),
        "mean": mean(tpot),
        "p95": tpot[int(0.95 * len(tpot))],
        "worst": tpot[-1],
    }
    if len(found) < 100:
        record["points"] = {" ".join(map(str, point)): error for point, error in found.items()}
    for name in ("by_group", "left_out", "points"):
        for key, value in record.get(name, {}).items():
            print(key, {k: round(v, 3) for k, v in value.items()})
    return record


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("what", choices=["steps", "servers"])
    parser.add_argument("--data", type=Path, required=True, help="folder of the published data")
    parser.add_argument("--servers", type=Path, help="AIConfigurator's file of all measured points")
    arguments = parser.parse_args()
    if arguments.what == "steps":
        found = step_record(arguments.data)
    else:
        found = server_record(
            measured(arguments.servers or arguments.data / "aiconfigurator/silicon_refs.csv")
        )
    record = {"environment": environment(), "shipped": asdict(CURRENT), arguments.what: found}
    write_record(arguments.json, record)


if __name__ == "__main__":
    main()
