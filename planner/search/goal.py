"""The goal: the highest goodput of the hardware, or the cluster of least cost or energy for a rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from .candidates import Candidate, Hardware, Kind
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
        used = Counter[str]()
        for _, count, kind in hardware.pools(candidate):
            used[kind.stock] += count * kind.gpus
        return (
            hardware.num_gpus(candidate) <= self.gpus
            and all(used[name] <= num for name, num in self.stocks)
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
    busy = dict(zip(("prefill", "decode", "colocated"), found.busy_s, strict=True))
    for role, count, kind in hardware.pools(candidate):
        if kind.power is None:
            return None
        prefill_s, decode_s = busy[role]
        idle_s = max(0.0, count * found.elapsed_s - prefill_s - decode_s)
        joules += (
            prefill_s * kind.power.prefill_w + decode_s * kind.power.decode_w + idle_s * kind.power.idle_w
        )
    return joules / 3600 / max(1, found.num_ended)


def settings_of(question: Question, goal: Goal, shape: Candidate) -> list[Candidate]:
    """A shape with each chunk budget, with batches about the largest that keeps TPOT, and with each mover."""
    decode = question.hardware.kinds[shape.decode_kind if shape.prefill else shape.prefill_kind]
    # few steps are as full as the fullest
    asked = question.tpot_range
    batch = largest_batch(decode.profile, question.demand, asked[0] if asked else None)
    movers = question.hardware.movers if shape.prefill else ("",)
    return [
        replace(shape, max_batch_tokens=chunk, max_num_seqs=seqs, mover=mover)
        for chunk in goal.chunks
        for seqs in (batch, 2 * batch, 4 * batch)
        for mover in movers
    ]


def shapes(hardware: Hardware, limits: Limits) -> Iterator[Candidate]:
    """Every split of every pair of kinds to which no worker can be added, and all of a kind colocated."""
    for p, prefill in enumerate(hardware.kinds):
        if prefill.prefills and prefill.decodes:
            together = _most(hardware, limits, Candidate(0, 0, 0, 1, 1, p, p), prefill)
            if together:
                yield Candidate(0, 0, together, 1, 1, p, p)
        for d, decode in enumerate(hardware.kinds):
            if not prefill.prefills or not decode.decodes:
                continue
            if prefill.hands_to(decode):
                yield from _splits(hardware, limits, p, d)


def _splits(hardware: Hardware, limits: Limits, p: int, d: int) -> Iterator[Candidate]:
    prefill, decode = hardware.kinds[p], hardware.kinds[d]
    seen: dict[int, Candidate] = {}  # by the decode workers: the one with the most for prompts
    for count in range(1, min(limits.gpus // prefill.gpus, prefill.most or limits.gpus) + 1):
        most = _most_decode(hardware, limits, Candidate(count, 0, 0, 1, 1, p, d), decode)
        if most < 1:
            break
        seen[most] = Candidate(count, most, 0, 1, 1, p, d)
    yield from seen.values()


def _most(hardware: Hardware, limits: Limits, empty: Candidate, kind: Kind) -> int:
    most = min(limits.gpus // kind.gpus, kind.most or limits.gpus)
    return next((n for n in range(most, 0, -1) if limits.hold(replace(empty, colocated=n), hardware)), 0)


def _most_decode(hardware: Hardware, limits: Limits, candidate: Candidate, kind: Kind) -> int:
    most = limits.gpus // kind.gpus
    if kind.most is not None:
        most = min(
            most, kind.most - (candidate.prefill if candidate.prefill_kind == candidate.decode_kind else 0)
        )
    return next((n for n in range(most, 0, -1) if limits.hold(replace(candidate, decode=n), hardware)), 0)


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
