"""Does an imitation of splitwise-sim, on our reading of its measurements, give its published results? And how much do ours differ?

For every run of llama2-70b whose per-request results are there: the imitation's requests beside the published ones, one by one for the
unit cases, and as percentiles. Then, for the runs that split, our own simulator on the same trace, measurements and numbers of machines,
as it really schedules and as the measurements were meant (decode time by batch and context).

    python -m splitserve.bench.validate_splitwise --data ../shared/data/splitwise-sim --json out.json
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..planner.profile.published import import_published, splitwise_curves
from ..planner.simulator.cluster import Cluster, Pool
from ..planner.simulator.records import RequestRecord
from ..planner.simulator.simulation import Simulation
from ..planner.trace.readers import open_trace
from ..planner.trace.request import Trace
from .environment import environment
from .splitwise_machine import GIB, MACHINE_BYTES, Clock, Job, LlmShape, Machine, Work

SHAPES = {"llama2-70b": LlmShape(135e9, 8192, 80), "bloom-176b": LlmShape(329e9, 14336, 70)}
DESIGNS = {  # hardware of the prompt machines, and of the token machines
    "Baseline-A100": ("a100-80gb", "a100-80gb"),
    "Baseline-H100": ("h100-80gb", "h100-80gb"),
    "Splitwise-AA": ("a100-80gb", "a100-80gb"),
    "Splitwise-HH": ("h100-80gb", "h100-80gb"),
    "Splitwise-HA": ("h100-80gb", "a100-80gb"),
    "Splitwise-HHcap": ("h100-80gb", "h100-80gb-pcap"),
}
LONG_QUEUE = 8192  # prompt tokens
TRANSFER_BYTES_PER_S = 200 * GIB
RETRY_S = 1.0
Tag = Literal["prompt", "token", "all"]


class Imitation:
    """The whole cluster: its scheduler (``token_jsq`` for the baselines, else ``mixed_pool``) over machines."""

    def __init__(self, perf_model: Path, model: str, design: str, num_prompt: int, num_token: int) -> None:
        self.clock, self.shape = Clock(), SHAPES[model]
        self.jobs: list[Job] = []
        self._splits = not design.startswith("Baseline")
        kinds: tuple[tuple[Tag, str, int], ...] = (
            ("prompt" if self._splits else "all", DESIGNS[design][0], num_prompt),
            ("token", DESIGNS[design][1], num_token),
        )
        self._machines: dict[str, list[Machine]] = {"prompt": [], "token": [], "all": [], "mixed": []}
        for tag, hardware, count in kinds:
            prompt_time, token_time = splitwise_curves(perf_model, model, hardware, 8)
            self._machines[tag] += [
                Machine(self.clock, self.shape, prompt_time, token_time, tag, self._on_free) for _ in range(count)
            ]  # fmt: skip

    def run(self, trace: Trace) -> list[Job]:
        """The jobs that were done."""
        for number, r in enumerate(trace):
            job = Job(number, r.arrival_s, r.num_prompt_tokens, r.num_output_tokens)
            self.clock.after(r.arrival_s, self._arriving(job))
        self.clock.run()
        return sorted(self.jobs, key=lambda job: job.number)

    def _arriving(self, job: Job) -> Callable[[], None]:
        def arrive() -> None:
            job.arrival = self.clock.now
            if self._splits:
                self._mixed_pool(job)
            else:
                machine = min(self._machines["all"], key=lambda m: m.promised_tokens)
                machine.promised_tokens += job.num_prompt_tokens + 1
                self._run_here(job, machine)

        return arrive

    def _works(self, job: Job) -> tuple[Work, Work]:
        rest = job.num_output_tokens - 1
        prompt = Work(job, True, self.shape.kv_bytes(job.num_prompt_tokens + 1), 1)
        return prompt, Work(job, False, self.shape.kv_bytes(rest), rest, after=lambda: self._done(job))

    def _done(self, job: Job) -> None:
        job.e2e = self.clock.now - job.arrival
        self.jobs.append(job)

    def _run_here(self, job: Job, machine: Machine) -> None:
        prompt, rest = self._works(job)
        machine.arrive(prompt)
        machine.arrive(rest)

    def _mixed_pool(self, job: Job) -> None:
        pools = self._machines
        prompt, rest = self._works(job)
        source = next((m for pool in ("prompt", "mixed") if (m := self._quiet(pools[pool], job)) is not None), None)
        target = next((m for pool in ("token", "mixed") if (m := self._roomy(pools[pool], prompt, rest)) is not None), None)
        if source is None and pools["token"]:
            source = self._borrow("token", lambda m: m.promised_tokens)
        if target is None and pools["prompt"]:
            target = self._borrow("prompt", lambda m: m.promised_memory)
        if source is None or target is None:
            source = target = min([*pools["prompt"], *pools["mixed"], *pools["token"]], key=lambda m: m.promised_tokens)
        source.promised_memory += prompt.memory
        target.promised_memory += rest.memory if source is target else prompt.memory + rest.memory
        source.promised_tokens += job.num_prompt_tokens
        target.promised_tokens += 1
        if source is target:
            source.arrive(prompt)
            source.arrive(rest)
        else:
            prompt.after = lambda: self._transfer(job, source, target, rest)
            source.arrive(prompt)

    def _quiet(self, machines: list[Machine], job: Job) -> Machine | None:
        best = min(machines, key=lambda m: m.promised_tokens, default=None)
        if best is None or (best.pending and best.promised_tokens + job.num_prompt_tokens > LONG_QUEUE):
            return None
        return best

    def _roomy(self, machines: list[Machine], prompt: Work, rest: Work) -> Machine | None:
        best = min(machines, key=lambda m: m.promised_memory, default=None)
        if best is None or best.promised_memory + prompt.memory + rest.memory >= MACHINE_BYTES:
            return None
        return best

    def _borrow(self, pool: str, load: Callable[[Machine], float]) -> Machine:
        machine = min(self._machines[pool], key=load)
        self._machines[pool].remove(machine)
        self._machines["mixed"].append(machine)
        return machine

    def _on_free(self, machine: Machine) -> None:
        if machine in self._machines["mixed"]:
            self._machines["mixed"].remove(machine)
            self._machines[machine.tag].append(machine)

    def _transfer(self, job: Job, source: Machine, target: Machine, rest: Work) -> None:
        if not target.fits(job.memory):
            self.clock.after(RETRY_S, lambda: self._transfer(job, source, target, rest))
            return
        target.memory += job.memory

        def arrived() -> None:
            source.free(job)
            target.arrive(rest)
            source.blocks_left()

        self.clock.after(self.shape.kv_bytes(job.num_prompt_tokens) / TRANSFER_BYTES_PER_S, arrived)


def published(path: Path) -> dict[int, dict[str, float]]:
    """By request."""
    with gzip.open(path, "rt", newline="") as file:
        return {int(float(row["request_ids"])): {k: float(v) for k, v in row.items()} for row in csv.DictReader(file)}


def of_jobs(jobs: list[Job]) -> dict[str, list[float]]:
    return {
        "ttft": [j.ttft for j in jobs],
        "tbt": [(j.e2e - j.ttft) / j.num_output_tokens for j in jobs],
        "e2e": [j.e2e for j in jobs],
    }


def percentiles(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {name: {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)} for name, values in times.items()}


def relative(ours: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {p: ours[name][p] / theirs[name][p] - 1 for p in theirs[name]} for name in theirs}


def compare(data: Path, path: Path, with_ours: bool) -> dict[str, Any]:
    """One published run."""
    model, trace_name, design = path.name.removesuffix(".csv.gz").split("__")
    name, num_prompt, num_token = design.rsplit("_", 2)
    trace = open_trace(data / "traces" / f"{trace_name}.csv.gz")
    theirs = published(path)
    jobs = Imitation(data / "perf_model.csv", model, name, int(num_prompt), int(num_token)).run(trace)
    known = sorted(theirs)
    reference = percentiles(
        {
            "ttft": [theirs[i]["ttft_times"] for i in known],
            "tbt": [theirs[i]["tbt_times"] for i in known],
            "e2e": [theirs[i]["response_times"] for i in known],
        }
    )
    imitated = percentiles(of_jobs(jobs))
    by_request = [max(abs(j.ttft - theirs[j.number]["ttft_times"]), abs(j.e2e - theirs[j.number]["response_times"])) for j in jobs]
    found = {
        "requests": len(known),
        "done": len(jobs),
        "published": reference,
        "imitated": imitated,
        "error": relative(imitated, reference),
    }
    found["worst_difference_of_a_request_s"] = max(by_request)
    if with_ours and name.startswith("Splitwise"):
        found["ours"] = ours = percentiles(as_we_schedule(data, model, name, int(num_prompt), int(num_token), trace))
        found["ours_differ"] = relative(ours, reference)
    return found


def as_we_schedule(data: Path, model: str, design: str, num_prompt: int, num_token: int, trace: Trace) -> dict[str, list[float]]:
    """Our simulator on the same machines; TBT as splitwise-sim counts it."""
    prompt, token = (import_published(data / "perf_model.csv", model, hardware, 8) for hardware in DESIGNS[design])
    pools = (
        Pool(role="prefill", count=num_prompt, profile=prompt, max_batch_tokens=2048),
        Pool(role="decode", count=num_token, profile=token, max_num_seqs=512),
    )
    records: list[RequestRecord] = []
    Simulation(Cluster(pools=pools, max_queue=1 << 30, coordinator_s=0.0), on_record=records.append).run(trace)
    done = [r for r in records if r.finished]
    return {
        "ttft": [r.ttft_s for r in done],
        "tbt": [(r.e2e_s - r.ttft_s) / r.num_received for r in done],
        "e2e": [r.e2e_s for r in done],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with perf_model.csv, traces and results")
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--with-ours", action="store_true", help="our own simulator as well")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results, wrong = {}, 0
    paths = sorted((arguments.data / "results" / "requests").glob(f"*{arguments.only}*.csv.gz".replace("**", "*")))
    if not paths:
        parser.error(f"{arguments.data} has no results with {arguments.only!r} in their names")
    for path in paths:
        name = path.name.removesuffix(".csv.gz")
        found = results[name] = compare(arguments.data, path, arguments.with_ours)
        worst = max(abs(error) for quantity in found["error"].values() for error in quantity.values())
        agrees = found["worst_difference_of_a_request_s"] < 2e-6 if "unit" in name else worst <= 0.02
        wrong += not agrees
        each = found["worst_difference_of_a_request_s"]
        print(f"{'agrees' if agrees else 'DIFFERS':8}{name}: worst percentile {worst:.2%}, worst request {each:.6f} s", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": environment(), "runs": results}, indent=1) + "\n")
    print(f"{len(results) - wrong} of {len(results)} runs agree (unit cases to 1e-6 s a request, others to 2% of any percentile)")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
