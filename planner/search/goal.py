"""The goal: the highest goodput of the hardware, or the cluster of least cost or energy for a rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

from ..simulator.cluster import PoolRole
from .candidates import ROLES, Candidate, Hardware
from .demand import largest_batch
from .goodput import Question, sketch
from .sketch import Sketched

Objective = Literal["goodput", "cost", "energy"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the whole cluster; None: no limit. ``stocks``: GPUs of each name."""

    gpus: int
    price_per_hour: float | None = None
    watts: float | None = None
    stocks: tuple[tuple[str, int], ...] = ()

    def hold(self, candidate: Candidate, hardware: Hardware) -> bool:
        """A price or power that is not known meets no limit."""
        price, watts = hardware.price_per_hour(candidate), hardware.watts(candidate)
        used, workers = Counter[str](), Counter[int]()
        for group, kind in hardware.pools(candidate):
            used[kind.stock] += group.count * kind.gpus
            workers[group.kind] += group.count
        enough = [(num, hardware.kinds[index].most) for index, num in workers.items()]
        return (
            hardware.num_gpus(candidate) <= self.gpus
            and all(used[name] <= num for name, num in self.stocks)
            and all(most is None or num <= most for num, most in enough)
            and (self.price_per_hour is None or (price is not None and price <= self.price_per_hour))
            and (self.watts is None or (watts is not None and watts <= self.watts))
        )


@dataclass(frozen=True, slots=True)
class Goal:
    """``rate``: what must be served, for cost and energy."""

    objective: Objective
    limits: Limits
    rate: float = 0.0
    chunks: tuple[int, ...] = (512, 2048)

    def value(self, question: Question, candidate: Candidate, goodput: float) -> float:
        """The higher, the better; minus infinity where the goal is missed."""
        if self.objective == "goodput":
            return goodput
        if goodput < self.rate:
            return float("-inf")
        if self.objective == "cost":
            return -(question.hardware.price_per_hour(candidate) or 0.0)
        return -(energy_wh(question, candidate, self.rate) or 0.0)


def energy_wh(question: Question, candidate: Candidate, rate: float) -> float | None:
    """Watt hours a request at this rate, by the sketch; None where a kind's power is not known."""
    if (candidate, rate) not in question.energies:
        found = sketch(question, candidate, rate, give_up=False)
        question.energies[candidate, rate] = energy_of(found, question.hardware, candidate)
    return question.energies[candidate, rate]


def energy_of(found: Sketched, hardware: Hardware, candidate: Candidate) -> float | None:
    joules = 0.0
    for (group, kind), busy_s in zip(hardware.pools(candidate), found.busy_s, strict=True):
        if kind.power is None:
            return None
        joules += kind.power.joules(group.count * found.elapsed_s, *busy_s)
    return joules / 3600 / max(1, found.num_ended)


def settings_of(question: Question, goal: Goal, shape: Candidate) -> list[Candidate]:
    """A shape with each chunk budget, with batches about the largest that keeps TPOT, and with each mover."""
    asked = question.tpot_range

    def batch(kind: int) -> int:
        profile = question.hardware.kinds[kind].profile
        return largest_batch(profile, question.demand, asked[0] if asked else None)

    own = batch(shape.decode_kind if shape.prefill else shape.prefill_kind)
    others = [(group, batch(group.kind)) for group in shape.beside]
    movers = question.hardware.movers if shape.prefill else ("",)
    return [
        replace(
            shape,
            max_batch_tokens=chunk,
            max_num_seqs=times * own,
            mover=mover,
            beside=tuple(replace(group, max_num_seqs=times * seqs) for group, seqs in others),
        )
        for chunk in goal.chunks
        for times in (1, 2, 4)  # few steps are as full as the fullest
        for mover in movers
    ]


def shapes(hardware: Hardware, limits: Limits) -> Iterator[Candidate]:
    """Every split of every pair of kinds to which no worker can be added, and all of a kind colocated."""
    for p, prefill in enumerate(hardware.kinds):
        if prefill.prefills and prefill.decodes:
            together = _largest(hardware, limits, _with(Candidate(0, 0, 0, 1, 1, p, p), "colocated"))
            if together is not None:
                yield together
        for d, decode in enumerate(hardware.kinds):
            if not prefill.prefills or not decode.decodes:
                continue
            if prefill.hands_to(decode):
                yield from _splits(hardware, limits, p, d)


def _splits(hardware: Hardware, limits: Limits, p: int, d: int) -> Iterator[Candidate]:
    seen: dict[int, Candidate] = {}  # by the decode workers: the one with the most for prompts
    for count in range(1, limits.gpus):
        found = _largest(hardware, limits, _with(Candidate(count, 0, 0, 1, 1, p, d), "decode"))
        if found is None:
            break
        seen[found.decode] = found
    yield from seen.values()


def _with(candidate: Candidate, role: PoolRole) -> Callable[[int], Candidate]:
    return lambda num: replace(candidate, **{role: num})  # type: ignore[arg-type]


def _largest(hardware: Hardware, limits: Limits, of_size: Callable[[int], Candidate]) -> Candidate | None:
    """The one with the most workers within the limits; None: not even with one."""
    low, high = 0, limits.gpus
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if limits.hold(of_size(middle), hardware) else (low, middle - 1)
    return of_size(low) if low else None


def joined(hardware: Hardware, limits: Limits, candidate: Candidate) -> Iterator[Candidate]:
    """The cluster with its own workers divided otherwise, and with as many workers of another kind in one of
    its pools as the limits allow, in place of one of its own or beside all of them."""
    yield from filter(None, map(candidate.moved, (-2, -1, 1, 2)))
    fewer = candidate, candidate.with_more(prefill=-1), candidate.with_more(decode=-1)
    for one in filter(lambda c: c.is_whole, dict.fromkeys(fewer)):
        for kind, role in product(range(len(hardware.kinds)), ROLES):
            if hardware.can_join(kind, role, one):
                found = _largest(hardware, limits, partial(one.joined_by, role, kind))
                if found is not None:
                    yield found


def mixtures(best: Candidate) -> Iterator[Candidate]:
    """Around a split: a quarter and a half of it colocated instead, the rest in its ratio; and all that
    generate colocated."""
    if best.prefill_kind == best.decode_kind:
        yield replace(best, decode=0, colocated=best.decode)
    for share in (4, 2):
        together = 2 * max(1, best.num_workers // share // 2)
        rest = best.num_workers - together
        if rest >= 2:
            prefill = min(max(1, round(rest * best.prefill / best.num_workers)), rest - 1)
            yield replace(best, prefill=prefill, decode=rest - prefill, colocated=together)
