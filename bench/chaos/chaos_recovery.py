"""How long streams stood still in a chaos run, and where that time went: by kind of fault, and by stage.

fault .. noticed        detection: the process's end, its silence, its lost connection noticed .. dispatched
absence: a role had no worker at all (a second fault); then wait: others that came back were computed first
dispatched .. token     prompt and answer so far computed again, behind those of others that came back token
.. arrival        from the coordinator to the client
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from ..operator_auth import OperatorAuth
from .chaos_streams import Stream

POLL_S = 0.5
LATE_S = 30.0  # a recovery later than this has another cause
GOAL_S = 1.0  # beside the time to compute prompt and answer again


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to which workers, and when it began (monotonic seconds)."""

    kind: str
    workers: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Standstill:
    """One request that a fault interrupted; seconds of each stage."""

    kind: str
    request_id: str
    num_tokens: int
    num_attempts: int
    detection: float
    absence: float
    wait: float
    computing: float
    delivery: float

    @property
    def total(self) -> float:
        return self.detection + self.absence + self.wait + self.computing + self.delivery

    @property
    def beside_computing(self) -> float:
        """What the goal bounds: the request's own prompt and answer are computed again, that takes what it
        takes."""
        return self.total - self.computing


STAGES = ("detection", "absence", "wait", "computing", "delivery", "total")


class RecoveryWatch:
    """Reads the coordinator's list of recoveries, before old ones are dropped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._found: dict[tuple[str, float], dict[str, Any]] = {}

    async def run(self) -> None:
        """Until cancelled. (The coordinator is not one of those that are killed.)"""
        async with httpx.AsyncClient(timeout=10, trust_env=False, auth=OperatorAuth()) as client:
            while True:
                await asyncio.sleep(POLL_S)
                with contextlib.suppress(httpx.HTTPError):  # asked again at once
                    self.take((await client.get(f"{self._url}/debug/state")).json())

    def take(self, state: dict[str, Any]) -> None:
        for recovery in state["last_recoveries"]:
            self._found[(recovery["request_id"], recovery["noticed"])] = recovery

    def report(self, faults: list[Fault], streams: list[Stream]) -> dict[str, Any]:
        """Whether the goal is met, percentiles by kind of fault and stage, and the slowest with their
        stages."""
        stood = list(standstills(list(self._found.values()), faults, streams))
        kinds = sorted({s.kind for s in stood})
        slowest = sorted(stood, key=lambda s: -s.total)[:8]
        return {
            "goal": goal([s for s in stood if s.kind == "kill"]),
            "all_s": percentiles([s.total for s in stood]),
            "by_fault": {kind: _summary([s for s in stood if s.kind == kind]) for kind in kinds},
            "slowest": [
                {name: _rounded(getattr(s, name)) for name in (*s.__slots__, "total")} for s in slowest
            ],
            "longest_gap_of_a_stream_s": percentiles(
                [max_gap(times) for s in streams for times in s.arrivals.values() if len(times) > 1]
            ),
        }


def standstills(
    found: list[dict[str, Any]], faults: list[Fault], streams: list[Stream]
) -> Iterator[Standstill]:
    """Each recovery with the fault that caused it: the latest one that hit the worker whose loss it names."""
    by_id = {s.request_id: s for s in streams}
    for recovery in found:
        fault = cause(recovery, faults)
        stream_id, _, choice = recovery["request_id"].rpartition("-")
        if stream_id not in by_id:
            continue  # the coordinator's own
        later = [t for t in by_id[stream_id].arrivals.get(int(choice), []) if t >= recovery["token"]]
        yield Standstill(
            kind=fault.kind if fault else "other: " + _kind_of(recovery["reason"]),
            request_id=recovery["request_id"],
            num_tokens=recovery["num_tokens"],
            num_attempts=recovery["num_attempts"],
            detection=recovery["noticed"] - fault.at if fault else 0.0,
            absence=recovery["absent_s"],
            wait=recovery["dispatched"] - recovery["noticed"] - recovery["absent_s"],
            computing=recovery["token"] - recovery["dispatched"],
            delivery=later[0] - recovery["token"] if later else 0.0,
        )


def cause(recovery: dict[str, Any], faults: list[Fault]) -> Fault | None:
    """The latest fault before it that hit the worker which its reason names."""
    able = [
        f
        for f in faults
        if 0 <= recovery["noticed"] - f.at < LATE_S
        and any(f"worker {w} " in recovery["reason"] for w in f.workers)
    ]
    return max(able, key=lambda f: f.at, default=None)


def max_gap(times: list[float]) -> float:
    return max(b - a for a, b in itertools.pairwise(times))


def percentiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"count": len(values), **({"max": round(values[0], 3)} if values else {})}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {
        "count": len(values),
        "p50": round(cuts[49], 3),
        "p99": round(cuts[98], 3),
        "max": round(max(values), 3),
    }


def _summary(stood: list[Standstill]) -> dict[str, Any]:
    return {
        "within_1_s_and_the_computing": _share_within(stood),
        **{f"{stage}_s": percentiles([getattr(s, stage) for s in stood]) for stage in STAGES},
    }


def goal(killed: list[Standstill]) -> dict[str, Any]:
    """First new token within GOAL_S of the kill plus the time to compute prompt and answer again: for 99 of
    100 streams?"""
    beside = percentiles([s.beside_computing for s in killed])
    found = {
        "first_token_after_kill_s": percentiles([s.total for s in killed]),
        "of_it_beside_the_computing_s": beside,
    }
    return (
        {**found, "within_1_s": _share_within(killed), "met": beside.get("p99", beside["max"]) <= GOAL_S}
        if killed
        else {}
    )


def _share_within(stood: list[Standstill]) -> float:
    return round(sum(s.beside_computing <= GOAL_S for s in stood) / len(stood), 3)


def _kind_of(reason: str) -> str:
    """The reason without what differs from one case to the next."""
    return " ".join(word for word in reason.split()[:8] if not any(c.isdigit() for c in word))


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value
