"""An imitation of a whole splitwise-sim cluster: its scheduler (``token_jsq`` for the baselines, else
``mixed_pool``) over its machines.

One run of any model, trace and design, with splitwise-sim's own measurements, to compare with a run of
splitwise-sim:

    python -m splitserve.bench.studies.splitwise_cluster \\
        --perf-model ../shared/data/splitwise-sim/perf_model.csv --model bloom-176b \\
        --trace ../shared/data/splitwise-sim/traces/rr_code_70_2min.csv.gz --design Splitwise-HH
        --prompt-machines 35 --token-machines 5

Percentiles as splitwise-sim defines them: TTFT ends with the prompt, TBT = (E2E - TTFT) / output tokens. What
never ends (all memory may be promised to answers that wait for each other) is counted and in no percentile,
as there.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ...traces.readers import open_trace
from ...traces.request import Trace
from ..environment import option_parser, write_record
from .live_errors import percentiles
from .splitwise_clock import Clock
from .splitwise_machine import GIB, MACHINE_BYTES, Job, LlmShape, Machine, Work
from .splitwise_slo import splitwise_curves

SHAPES = {"llama2-70b": LlmShape(135e9, 8192, 80), "bloom-176b": LlmShape(329e9, 14336, 70)}
DESIGNS = {  # hardware of the prompt machines, and of the token machines
    "Baseline-A100": ("a100-80gb", "a100-80gb"),
    "Baseline-H100": ("h100-80gb", "h100-80gb"),
    "Splitwise-AA": ("a100-80gb", "a100-80gb"),
    "Splitwise-HH": ("h100-80gb", "h100-80gb"),
    "Splitwise-HA": ("h100-80gb", "a100-80gb"),
    "Splitwise-HHcap": ("h100-80gb", "h100-80gb-pcap"),
}
GPUS = 8  # of a machine
LONG_QUEUE = 8192  # prompt tokens
TRANSFER_BYTES_PER_S = 200 * GIB
RETRY_S = 1.0
Tag = Literal["prompt", "token", "all"]


class Imitation:
    """The whole cluster: its scheduler (``token_jsq`` for the baselines, else ``mixed_pool``) over
    machines."""

    def __init__(self, perf_model: Path, model: str, design: str, num_prompt: int, num_token: int) -> None:
        self.clock, self.shape = Clock(), SHAPES[model]
        self.jobs: list[Job] = []
        self._num_retries = 0  # that are under way
        self._splits = not design.startswith("Baseline")
        kinds: tuple[tuple[Tag, str, int], ...] = (
            ("prompt" if self._splits else "all", DESIGNS[design][0], num_prompt),
            ("token", DESIGNS[design][1], num_token),
        )
        self._machines: dict[str, list[Machine]] = {"prompt": [], "token": [], "all": [], "mixed": []}
        for tag, hardware, count in kinds:
            prompt_time, token_time = splitwise_curves(perf_model, model, hardware, GPUS)
            self._machines[tag] += [
                Machine(self.clock, self.shape, prompt_time, token_time, tag, self._on_free)
                for _ in range(count)
            ]

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
        source = next(
            (m for pool in ("prompt", "mixed") if (m := self._quiet(pools[pool], job)) is not None), None
        )
        target = next(
            (m for pool in ("token", "mixed") if (m := self._roomy(pools[pool], prompt, rest)) is not None),
            None,
        )
        if source is None and pools["token"]:
            source = self._borrow("token", lambda m: m.promised_tokens)
        if target is None and pools["prompt"]:
            target = self._borrow("prompt", lambda m: m.promised_memory)
        if source is None or target is None:
            source = target = min(
                [*pools["prompt"], *pools["mixed"], *pools["token"]], key=lambda m: m.promised_tokens
            )
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
            self._retry(lambda: self._transfer(job, source, target, rest))
            return
        target.memory += job.memory

        def arrived() -> None:
            source.free(job)
            target.arrive(rest)
            source.blocks_left()

        self.clock.after(self.shape.kv_bytes(job.num_prompt_tokens) / TRANSFER_BYTES_PER_S, arrived)

    def _retry(self, action: Callable[[], None]) -> None:
        """After a second; never, where nothing but retries is left that could happen: no memory will become
        free."""

        def again() -> None:
            self._num_retries -= 1
            action()

        if self.clock.num_events > self._num_retries:
            self._num_retries += 1
            self.clock.after(RETRY_S, again)


def of_jobs(jobs: Sequence[Job]) -> dict[str, list[float]]:
    """Seconds, in the order of the jobs."""
    return {
        "ttft": [j.ttft for j in jobs],
        "tbt": [(j.e2e - j.ttft) / j.num_output_tokens for j in jobs],
        "e2e": [j.e2e for j in jobs],
    }


def write_requests(path: Path, jobs: Sequence[Job]) -> None:
    """A row for each request that was done, in splitwise-sim's columns; gzip'ed if the name ends in .gz."""
    with gzip.open(path, "wt", newline="") if path.suffix == ".gz" else path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "request_ids",
                "response_times",
                "ttft_times",
                "tbt_times",
                "nth_token_overheads",
                "prompt_sizes",
                "token_sizes",
            ]
        )
        for job in jobs:
            times = (
                job.e2e,
                job.ttft,
                (job.e2e - job.ttft) / job.num_output_tokens,
                job.decode_began - job.prompt_ended,
            )
            writer.writerow(
                [job.number, *(f"{t:.9g}" for t in times), job.num_prompt_tokens, job.num_output_tokens]
            )


def main() -> int:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--perf-model", type=Path, required=True, help="splitwise-sim's perf_model.csv")
    parser.add_argument("--trace", type=Path, required=True, help="any trace that `splitserve trace` reads")
    parser.add_argument("--model", default="llama2-70b", choices=list(SHAPES))
    parser.add_argument("--design", default="Splitwise-HH", choices=list(DESIGNS))
    parser.add_argument("--prompt-machines", type=int, required=True, help="of a baseline: all machines")
    parser.add_argument("--token-machines", type=int, default=0)
    parser.add_argument("--requests", type=Path, help="write each request's times to this CSV file")
    arguments = parser.parse_args()
    if arguments.design.startswith("Baseline") == bool(arguments.token_machines):
        parser.error("a baseline has no --token-machines, and a Splitwise design needs some")
    counts = arguments.prompt_machines, arguments.token_machines
    cluster = Imitation(arguments.perf_model, arguments.model, arguments.design, *counts)
    trace = open_trace(arguments.trace)
    jobs = cluster.run(trace)
    found: dict[str, Any] = {
        "requests": sum(1 for _ in trace),
        "done": len(jobs),
        **percentiles(of_jobs(jobs)),
    }
    print(f"{found['done']} of {found['requests']} requests done")
    for name in ("ttft", "tbt", "e2e"):
        print(f"{name:5}" + "  ".join(f"{p} {seconds:.6f} s" for p, seconds in found[name].items()))
    if arguments.requests:
        write_requests(arguments.requests, jobs)
    write_record(arguments.json, {"command": sys.argv[1:], **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
