"""Service levels as people write them.

In ``ttft=0.5@p90,tpot=0.05@p90`` the largest share of the requests keeps all bounds, in seconds, at once.
In ``ttft=2x@p50,ttft=6x@p99,tpot=1.25x@p50,of=PROFILE`` a quantity stands twice, or the bounds are multiples
of a request's times alone on a worker of PROFILE: each bound is kept by its own share of the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.latency_profile import Profile
from ...transport.latency_bounds import DEFAULT_PERCENT
from ..errors import SimulationError
from .records import RequestRecord

_BOUND = r"(ttft|tpot|tpot_all|e2e)=\d*\.?\d+x?(@p\d+(\.\d+)?)?"
NOTATION = rf"^$|^{_BOUND}(,{_BOUND})*(,of=[^,]+)?$"


class Seconds(NamedTuple):
    """What a request may take, or takes. ``tpot_all``: time after the first token over all tokens."""

    ttft: float = inf
    tpot: float = inf
    tpot_all: float = inf
    e2e: float = inf


class Unloaded:
    """What a request takes that has a worker to itself."""

    def __init__(self, profile: Profile) -> None:
        self.name, self._profile = profile.name, profile
        self._known: dict[int, tuple[float, float]] = {}

    def __getitem__(self, tokens: tuple[int, int]) -> Seconds:
        """By the numbers of prompt and output tokens."""
        prompt, output = tokens
        if prompt not in self._known:
            first = self._profile.prefill.seconds(prompt, prompt * (prompt + 1) / 2, 1)
            self._known[prompt] = first, self._profile.decode.seconds(1, prompt, 1)
        ttft, tpot = self._known[prompt]
        return Seconds(ttft, tpot, tpot, ttft + tpot * (output - 1))


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in seconds, or in multiples of ``unloaded``; None: not asked for. A request is good that meets
    all of them and finished.

    ``levels``: bounds that shares of the requests keep, each by itself; the others are None then. ``share``:
    of such a level; ``weight``: by which its misses count, so that all levels allow as many."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    tpot_all_s: float | None = None
    unloaded: Unloaded | None = None
    levels: tuple[Slo, ...] = ()
    share: float | None = None
    weight: float = 1.0

    @property
    def parts(self) -> tuple[Slo, ...]:
        """The levels, or the bounds that are kept at once."""
        return self.levels or (self,)

    def failed(self, missed: Sequence[int]) -> float:
        """Requests that failed, if ``missed`` of them missed each part: those of the part that is worst."""
        return max(part.weight * num for part, num in zip(self.parts, missed, strict=True))

    def most(self, num_prompt_tokens: int, num_output_tokens: int) -> Seconds:
        """What a request of these lengths may take."""
        asked = (self.ttft_s, self.tpot_s, self.tpot_all_s, self.e2e_s)
        bounds = Seconds(*(inf if bound is None else bound for bound in asked))
        if self.unloaded is None:
            return bounds
        alone = self.unloaded[num_prompt_tokens, num_output_tokens]
        return Seconds(*(times * seconds for times, seconds in zip(bounds, alone, strict=True)))

    def tpot_range(self, num_prompt_tokens: float) -> tuple[float, float] | None:
        """The least and the greatest TPOT asked for with this prompt; None where none is."""
        length = round(num_prompt_tokens), 2
        asked = [min(most.tpot, most.tpot_all) for most in (part.most(*length) for part in self.parts)]
        asked = [seconds for seconds in asked if seconds < inf]
        return (min(asked), max(asked)) if asked else None

    def met_by(self, record: RequestRecord) -> bool:
        """TPOT is (last token - first token) / (tokens - 1); a request with one token meets any."""
        if not record.finished:
            return False
        tpot, most = record.tpot_s, self.most(record.num_prompt_tokens, record.num_asked_tokens)
        return (
            record.ttft_s <= most.ttft
            and (tpot is None or tpot <= most.tpot)
            and record.tpot_all_s <= most.tpot_all
            and record.e2e_s <= most.e2e
        )

    def is_missed_by(self, record: RequestRecord, now: float) -> bool:
        """Whether a request that has not ended cannot be good any more."""
        first, num = record.first_at, record.num_asked_tokens
        most = self.most(record.num_prompt_tokens, num)
        return (
            (first or now) - record.arrived_at > most.ttft
            or (first > 0 and num > 1 and now - first > most.tpot * (num - 1))
            or (first > 0 and now - first > most.tpot_all * num)
            or now - record.arrived_at > most.e2e
        )

    def words(self) -> str:
        """``ttft <= 0.5 s, tpot <= 0.05 s``; empty where nothing is asked for."""
        unit = " s" if self.unloaded is None else "x"
        names = {"ttft": self.ttft_s, "tpot": self.tpot_s, "tpot_all": self.tpot_all_s, "e2e": self.e2e_s}
        share = "" if self.share is None else f" at p{100 * self.share:g}"
        words = [
            *(f"{name} <= {bound:g}{unit}{share}" for name, bound in names.items() if bound is not None),
            *(level.words() for level in self.levels),
        ]
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """``bounds``: what a request may take. ``attainment``: which share of all requests must be within *all*
    of them at once (as DistServe defines goodput); of several percents, the largest. With levels, that share
    stands for each level's own. ``share_given``: whether the user has given one."""

    bounds: Slo
    attainment: float = DEFAULT_PERCENT / 100
    share_given: bool = False


def parse_slo(text: str) -> ServiceLevel:
    """``text`` matches NOTATION. Raises SimulationError and ProfileError."""
    text, _, reference = text.partition(",of=")
    asked = [_parsed(part) for part in text.split(",") if part]
    shares = [share for *_, share in asked if share is not None]
    relative = {multiple for _, _, multiple, _ in asked}
    if len(relative) > 1 or (relative == {True}) != bool(reference):
        raise SimulationError(
            "--slo: give all bounds in seconds, or all as multiples such as ttft=2x@p50 and, last, "
            "of=PROFILE, the worker on which a request is alone"
        )
    attainment = max(shares, default=DEFAULT_PERCENT / 100)
    names = [name for name, *_ in asked]
    if len(set(names)) == len(names) and not reference:
        bounds: dict[str, Any] = {name: value for name, value, *_ in asked}
        return ServiceLevel(Slo(**bounds), attainment, bool(shares))
    if len({(name, share) for name, _, _, share in asked}) < len(asked):
        raise SimulationError("--slo: names a quantity twice at one percentile")
    unloaded = Unloaded(Profile.read(Path(reference))) if reference else None
    attainment = DEFAULT_PERCENT / 100
    levels = []
    for name, value, _, given in asked:
        share = attainment if given is None else given
        bound: dict[str, Any] = {name: value}
        levels.append(Slo(unloaded=unloaded, share=share, weight=(1 - attainment) / (1 - share), **bound))
    return ServiceLevel(Slo(unloaded=unloaded, levels=tuple(levels)), attainment, True)


def _parsed(text: str) -> tuple[str, float, bool, float | None]:
    """Field of ``Slo``, bound, whether it is a multiple, and share. Raises SimulationError."""
    name, _, value = text.partition("=")
    bound, _, percent = value.partition("@p")
    if percent and not 0 < float(percent) < 100:
        raise SimulationError("--slo: a percentile lies between p0 and p100, as in ttft=0.5@p90")
    return (
        f"{name}_s",
        float(bound.rstrip("x")),
        bound.endswith("x"),
        float(percent) / 100 if percent else None,
    )
