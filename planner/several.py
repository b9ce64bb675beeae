"""``splitserve plan`` for several models on one inventory: each gets GPUs, and then a plan of its own.

A model's headroom is what its share serves over the rate of its own trace. GPUs are divided so that the least
headroom is as high as the sketch finds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ..engine.latency_profile import ProfileError
from .errors import SimulationError
from .plan_command import FEWEST_PLANNED, num_processes, plan, the_goal, the_hardware, the_load
from .search.goal import settings_of, shapes
from .search.goodput import Question
from .search.hardware_file import stocks_of
from .search.search import best_sketched
from .settings import PlanSettings
from .simulator.slo import parse_slo

UNITS = 32
"""Parts in which an inventory is divided at most."""
MOST_MOVED = 8


class _Model:
    """One model with its load. ``share``: its GPUs, by name."""

    def __init__(self, settings: PlanSettings) -> None:
        self.settings, self.share = settings, Counter[str]()
        load = the_load(settings)
        self._load = replace(load, requests=load.requests[:FEWEST_PLANNED])
        self._sketched = dict[frozenset[tuple[str, int]], float]()

    @property
    def name(self) -> str:
        return Path(str(self.settings.profile).partition(",")[0]).name

    @property
    def own(self) -> PlanSettings:
        """The settings to plan with."""
        share = " ".join(f"{num}x{gpu}" for gpu, num in self.share.items() if num)
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
    """The command: divide the inventory, and plan each model on its share. Raises what ``plan`` does."""
    if not settings.other_models:
        return plan(settings)
    each = [settings.model_copy(update={"other_models": ()})]
    each += [each[0].model_copy(update=dict(other)) for other in settings.other_models]
    models = [_Model(one) for one in each]
    _divide(models, Counter(dict(stocks_of(settings.inventory or ""))))
    console = Console()
    for model in models:
        if not model.headroom(sketched=True):
            raise SimulationError(
                f"the inventory is too small, or --slo too tight, for {model.name} beside the others"
            )
        share = f"{model.name} on {model.own.inventory}"
        console.print(f"{share}: about {model.headroom(sketched=True):.2f} times its load", highlight=False)
    for model in models:
        console.rule(model.name)
        own = {name: getattr(settings, name) for name in ("json_file", "plot_file", "launch_file")}
        named = {n: path and path.with_name(f"{model.name}-{path.name}") for n, path in own.items()}
        if status := plan(model.own.model_copy(update=named)):
            return status
    return 0


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
