"""``splitserve plan`` for several models on one inventory: each gets GPUs, and then a plan of its own.

A model's headroom is what its share serves over the rate of its own trace. GPUs are divided so that the least
headroom is as high as the sketch finds.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from ..engine.latency_profile import ProfileError
from ..traces.console import figures_table, result_console
from .errors import SimulationError
from .plan_command import FEWEST_PLANNED, num_processes, plan, the_goal, the_hardware, the_load
from .search.goal import settings_of, shapes
from .search.goodput import Question
from .search.hardware_file import DEGREES, prices_of, stocks_of
from .search.plan import Plan
from .search.search import best_sketched
from .settings import PlanSettings
from .simulator.slo import parse_slo

UNITS = 32
"""Parts in which an inventory is divided at most."""
MOST_MOVED = 8
STOPPED = 130
"""Exit status after Ctrl-C or SIGTERM."""


class _Model:
    """One model with its load. ``name``: of its files; ``share``: its GPUs, by name."""

    def __init__(self, name: str, settings: PlanSettings) -> None:
        self.name, self.settings, self.share = name, settings, Counter[str]()
        load = the_load(settings)
        self._load = replace(load, requests=load.requests[:FEWEST_PLANNED])
        self._sketched = dict[frozenset[tuple[str, int]], float]()

    @property
    def own(self) -> PlanSettings:
        """The settings to plan with."""
        prices = {gpu: f":{price:g}" for gpu, price in prices_of(self.settings.inventory or "").items()}
        share = " ".join(f"{num}x{gpu}{prices.get(gpu, '')}" for gpu, num in self.share.items() if num)
        return self.settings.model_copy(update={"inventory": share})

    def headroom(self, *, sketched: bool) -> float:
        """By the sketch, or at most: by means. 0 where the weights do not fit."""
        if not self.share.total():
            return 0.0
        key = frozenset(self.share.items())
        if not sketched or key not in self._sketched:
            try:
                hardware = the_hardware(self.own)
            except ProfileError:
                return 0.0
            question = Question.of(hardware, self._load, parse_slo(self.settings.slo), self.settings.seed)
            goal = the_goal(self.own, question)
            if not sketched:
                each = (c for s in shapes(hardware, goal.limits) for c in settings_of(question, goal, s))
                return max(map(question.bound, each), default=0.0) / self._load.rate
            self._sketched[key] = (
                best_sketched(question, goal, num_processes(self.settings)) / self._load.rate
            )
        return self._sketched[key]


def plan_each(settings: PlanSettings) -> int:
    """The command: divide the inventory, and plan each model on its share. Return the exit status: 1 where no
    cluster meets the bounds. Raises what ``plan`` does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit, too, gets what is known
    if not settings.other_models:
        found = plan(settings)
        return STOPPED if found is None else int(found.winner.goodput <= 0)
    each = [settings.model_copy(update={"other_models": ()})]
    each += [each[0].model_copy(update=dict(other)) for other in settings.other_models]
    models = list(map(_Model, names_of(each), each))
    _divide(models, Counter(dict(stocks_of(settings.inventory or ""))))
    console = result_console()
    for model in models:
        if not model.headroom(sketched=True):
            raise SimulationError(
                f"the inventory is too small, or --slo too tight, for {model.name} beside the others"
            )
        share = f"{model.name} on {model.own.inventory}"
        console.print(f"{share}: about {model.headroom(sketched=True):.2f} times its load", highlight=False)
    plans, num_dealt = list[tuple[str, Plan]](), 0
    stocks = stocks_of(settings.inventory or "")
    for model in models:
        console.print(f"\n[bold]{model.name}[/bold]", highlight=False)
        own = {name: getattr(settings, name) for name in ("json_file", "plot_file", "launch_file")}
        named = {n: path and path.with_name(f"{model.name}-{path.name}") for n, path in own.items()}
        if (found := plan(model.own.model_copy(update=named))) is None:
            return STOPPED
        plans.append((model.name, found))
        if settings.launch_file and len(stocks) == 1 and stocks[0][1] <= DEGREES[-1]:
            gpus = ",".join(str(num_dealt + i) for i in range(model.share.total()))
            of_its_own = f"CUDA_VISIBLE_DEVICES={gpus} and --port {8000 + len(plans) - 1}"
            console.print(f"on one host with the others: {of_its_own}", highlight=False, soft_wrap=True)
        num_dealt += model.share.total()
    console.print("", _table(plans), sep="\n")
    return int(any(found.winner.goodput <= 0 for _, found in plans))


def names_of(each: list[PlanSettings]) -> list[str]:
    """Models' names, with a number where several loads have the same model."""
    names = [Path(str(one.profile).partition(",")[0]).name for one in each]
    return [f"{name}-{i}" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def _table(plans: list[tuple[str, Plan]]) -> Table:
    """All models' rates, latencies and costs."""
    kinds = [kind for _, found in plans for kind in found.question.hardware.kinds]
    priced = all(kind.price_per_hour is not None for kind in kinds)
    costs = ["an hour", "a million tokens"] if priced else []
    right = ["requests/s", "times its load", "TTFT p90 ms", "TPOT p90 ms", *costs, "Wh a request"]
    table = figures_table("model", *right)
    for name, found in plans:
        price = found.question.hardware.price_per_hour(found.winner.candidate)
        tokens = 3600 * max(found.served, 1e-9) * found.question.demand.output
        of = found.at_goodput.tallies.percentiles()
        cells = [found.served, found.served / found.question.load.rate]
        cells += [1e3 * of[what]["p90"] if what in of else 0.0 for what in ("ttft", "tpot")]
        cells += [price, 1e6 * price / tokens] if priced and price is not None else []
        table.add_row(name, *(f"{cell:.2f}" for cell in cells), f"{found.energy_wh or 0:.3g}")
    return table


def _divide(models: list[_Model], stocks: Counter[str]) -> None:
    """Deal the GPUs out to the model with the least headroom, by means; then move some, by the sketch."""
    unit = max(1, stocks.total() // UNITS)
    for gpu, num in stocks.items():
        for begun in range(0, num, unit):
            poorest = min(models, key=lambda m: (m.headroom(sketched=False), m.share.total()))
            poorest.share[gpu] += min(unit, num - begun)
    for _ in range(MOST_MOVED):
        if not _moved(models, unit):
            break


def _moved(models: list[_Model], unit: int) -> bool:
    """Move GPUs from another model to the one with the least headroom, if that raises the least one."""
    least = min(models, key=lambda m: m.headroom(sketched=True))
    before = least.headroom(sketched=True)
    for other in sorted(models, key=lambda m: -m.headroom(sketched=True)):
        for gpu in [gpu for gpu, num in other.share.items() if num >= unit and other is not least]:
            for num in (unit, 2 * unit):
                if num > other.share[gpu]:
                    continue
                other.share[gpu] -= num
                least.share[gpu] += num
                if min(m.headroom(sketched=True) for m in (least, other)) > before:
                    return True
                other.share[gpu] += num
                least.share[gpu] -= num
    return False
