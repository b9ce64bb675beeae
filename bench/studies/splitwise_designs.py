"""Splitwise's comparisons of cluster designs under its nine service levels, with prices and powers as inputs.

    iso-power        machines that draw as much as the given DGX-H100: the highest rate at which all nine hold
    iso-cost         the same for machines that cost as much
    iso-throughput   the cheapest, and the thriftiest, machines that hold all nine at a given rate

Machines and scheduler are the imitation of splitwise-sim, which gives its published results
(validate_splitwise.py). How a design divides its machines is searched from many shares on, each as long as
another one holds a higher rate.

    python -m splitserve.bench.studies.splitwise_designs --data ../shared/data/splitwise-sim \\
        --json out.json --plot out.png
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ...traces.readers import open_trace
from ..environment import environment, option_parser, write_record
from .splitwise_cluster import DESIGNS, Imitation
from .splitwise_rows import Comparison, Row, draw, shown
from .splitwise_slo import NineSlos

STARTS = 7
"""Divisions at which the search begins, from the fewest machines for prompts to the most."""


@dataclass(frozen=True)
class Machines:
    """Price and power of one DGX of each kind, in any unit; ``capped``: power of a capped one as a share."""

    price_a100: float
    price_h100: float
    power_a100: float
    power_h100: float
    capped: float

    def of(self, design: str, num_prompt: int, num_token: int) -> tuple[float, float]:
        """(price, power) of these machines."""
        prompt, token = DESIGNS[design]
        price = num_prompt * self._price(prompt) + num_token * self._price(token)
        return price, num_prompt * self._power(prompt) + num_token * self._power(token)

    def _price(self, hardware: str) -> float:
        return self.price_a100 if hardware.startswith("a100") else self.price_h100

    def _power(self, hardware: str) -> float:
        power = self.power_a100 if hardware.startswith("a100") else self.power_h100
        return power * (self.capped if hardware.endswith("pcap") else 1.0)


@dataclass(frozen=True)
class Task:
    """One design in one comparison. ``amount``: the budget of power or price, or the rate."""

    data: Path
    model: str
    workload: str
    comparison: Comparison
    design: str
    machines: Machines
    amount: float


class Trials:
    """Whether a division of machines holds all nine at a rate; each is tried once."""

    def __init__(self, task: Task) -> None:
        self.task, self._slos = task, NineSlos(task.data / "perf_model.csv", task.model)
        self.rates = rates_of(task.data, task.workload)
        self._known: dict[tuple[int, int, int], list[str]] = {}

    @property
    def splits(self) -> bool:
        return self.task.design.startswith("Splitwise")

    def missed(self, num_prompt: int, num_token: int, rate: int) -> list[str]:
        key = num_prompt, num_token, rate
        if key not in self._known:
            trace = open_trace(self.task.data / "traces" / f"rr_{self.task.workload}_{rate}_2min.csv.gz")
            jobs = Imitation(
                self.task.data / "perf_model.csv", self.task.model, self.task.design, num_prompt, num_token
            ).run(trace)
            self._known[key] = self._slos.missed(jobs, sum(1 for _ in trace))
        return self._known[key]

    def highest(self, num_prompt: int, num_token: int, above: int = 0) -> int:
        """The highest of the traces' rates that is held, if it is above ``above``; else 0. What holds a rate
        holds lower ones."""
        rates = [r for r in self.rates if r > above]
        if not rates or (above and self.missed(num_prompt, num_token, rates[0])):
            return 0
        num_held = bisect_left(rates, True, key=lambda rate: bool(self.missed(num_prompt, num_token, rate)))
        return rates[num_held - 1] if num_held else 0


def rates_of(data: Path, workload: str) -> list[int]:
    """Requests a second of the traces that are there."""
    found = (
        re.fullmatch(rf"rr_{workload}_(\d+)_2min\.csv\.gz", path.name) for path in (data / "traces").iterdir()
    )
    return sorted(int(match[1]) for match in found if match)


def run(task: Task) -> list[Row]:
    trials = Trials(task)
    return _for_rate(trials) if task.comparison == "iso-throughput" else [_from_budget(trials)]


def _from_budget(trials: Trials) -> Row:
    """The division with the highest rate: from each start its neighbours, as long as one holds more than any
    before."""
    divisions = list(_divisions(trials))
    if not divisions:
        return _row(trials, 0, 0, 0.0, ["the budget buys no cluster"])
    best, rate = divisions[0], 0
    for start in range(STARTS):
        step, at = 8, round(start * (len(divisions) - 1) / (STARTS - 1))
        tried = [at]
        while step >= 1:
            for other in tried:
                if 0 <= other < len(divisions) and (held := trials.highest(*divisions[other], rate)) > rate:
                    at, best, rate, step = other, divisions[other], held, 8
                    break
            step //= 2
            tried = [at - step, at + step]
    following = next((r for r in trials.rates if r > rate), None)
    return _row(trials, *best, float(rate), trials.missed(*best, following) if following else [])


def _divisions(trials: Trials) -> Iterator[tuple[int, int]]:
    """All ways to spend the budget, by prompt machines."""
    task, which = trials.task, 0 if trials.task.comparison == "iso-cost" else 1
    prompt, token = task.machines.of(task.design, 1, 0)[which], task.machines.of(task.design, 0, 1)[which]
    budget = task.amount * (1 + 1e-9)
    if not trials.splits:
        yield int(budget // prompt), 0
        return
    for num_prompt in range(1, int(budget // prompt) + 1):
        if (num_token := int((budget - num_prompt * prompt) // token)) >= 1:
            yield num_prompt, num_token


def _for_rate(trials: Trials) -> list[Row]:
    """The cheapest, and the thriftiest where that is another one: down the stairs of least divisions that
    hold the rate."""
    rate = int(trials.task.amount)
    if not trials.splits:
        return [_row(trials, _fewest_prompt(trials, 0, rate), 0, float(rate), [])]
    stairs = list(_stairs(trials, rate))
    costs = {
        division: tuple(round(x, 6) for x in trials.task.machines.of(trials.task.design, *division))
        for division in stairs
    }
    cheapest = min(stairs, key=lambda division: costs[division])
    thriftiest = min(stairs, key=lambda division: costs[division][::-1])
    return [_row(trials, *division, float(rate), []) for division in dict.fromkeys((cheapest, thriftiest))]


def _stairs(trials: Trials, rate: int) -> Iterator[tuple[int, int]]:
    """For ever fewer prompt machines the fewest token machines."""
    fewest_prompt = _fewest_prompt(trials, rate, rate)  # with as many token machines as one could want
    num_token = 1
    for num_prompt in range(fewest_prompt + 6, fewest_prompt - 1, -1):
        while trials.missed(num_prompt, num_token, rate):
            num_token += 1
        yield num_prompt, num_token


def _fewest_prompt(trials: Trials, num_token: int, rate: int) -> int:
    """That hold the rate with these token machines."""
    most = 4 * rate
    return 1 + bisect_left(range(1, most), True, key=lambda count: not trials.missed(count, num_token, rate))


def _row(trials: Trials, num_prompt: int, num_token: int, rate: float, missed: list[str]) -> Row:
    task = trials.task
    price, power = task.machines.of(task.design, num_prompt, num_token)
    return Row(task.workload, task.comparison, task.design, num_prompt, num_token, rate, price, power, missed)


def tasks(arguments: argparse.Namespace) -> list[Task]:
    machines = Machines(
        arguments.price_a100,
        arguments.price_h100,
        arguments.power_a100,
        arguments.power_h100,
        arguments.capped,
    )
    price, power = machines.of("Baseline-H100", arguments.h100_machines, 0)
    amounts: dict[Comparison, float] = {
        "iso-power": power,
        "iso-cost": price,
        "iso-throughput": arguments.rate,
    }
    return [
        Task(arguments.data, arguments.model, workload, comparison, design, machines, amounts[comparison])
        for workload in arguments.workloads.split(",")
        for comparison in amounts
        if comparison in arguments.comparisons.split(",")
        for design in arguments.designs
    ]


def main() -> int:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with perf_model.csv and traces")
    parser.add_argument("--model", default="bloom-176b", help="bloom-176b (the paper's) or llama2-70b")
    parser.add_argument("--workloads", default="code,conv")
    parser.add_argument("--comparisons", default="iso-power,iso-cost,iso-throughput")
    parser.add_argument("--designs", nargs="+", choices=list(DESIGNS), default=list(DESIGNS))
    parser.add_argument(
        "--h100-machines", type=int, default=40, help="the budget: what so many DGX-H100 draw, and cost"
    )
    parser.add_argument(
        "--rate", type=int, default=70, help="of iso-throughput: requests a second of one of the traces"
    )
    parser.add_argument("--price-a100", type=float, default=17.68, help="an hour, of a DGX-A100")
    parser.add_argument("--price-h100", type=float, default=38.08, help="an hour, of a DGX-H100")
    parser.add_argument("--power-a100", type=float, default=24.8, help="of a DGX-A100, in any unit")
    parser.add_argument(
        "--power-h100", type=float, default=43.4, help="of a DGX-H100: 1.75 times, as the paper provisions"
    )
    parser.add_argument(
        "--capped", type=float, default=0.7, help="power of a capped token machine, as a share"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if arguments.comparisons.find("iso-throughput") >= 0:
        for workload in arguments.workloads.split(","):
            if arguments.rate not in rates_of(arguments.data, workload):
                parser.error(
                    f"no trace of {workload} has {arguments.rate} requests/s; there are "
                    f"{rates_of(arguments.data, workload)}"
                )
    began = time.monotonic()
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        rows = [row for found in pool.map(run, tasks(arguments)) for row in found]
    print(shown(rows))
    print(f"took {time.monotonic() - began:.0f} s")
    inputs: dict[str, Any] = {k: v for k, v in vars(arguments).items() if not isinstance(v, Path)}
    record = {"environment": environment(), "inputs": inputs, "rows": [asdict(row) for row in rows]}
    write_record(arguments.json, record)
    if arguments.plot:
        draw(arguments.plot, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
