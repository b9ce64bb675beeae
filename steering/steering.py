"""One coordinator's steering: what the lifecycle knows, as the pool controller wants to see it. Pure; times in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from typing import Any

from ..coordinator.lifecycle.flips import FlipRecord
from ..coordinator.lifecycle.lifecycle import Lifecycle
from ..coordinator.lifecycle.request import Ended, Request
from ..coordinator.lifecycle.worker import Worker
from ..engine.latency_profile import Profile
from ..transport.messages.messages import Role
from .controller import Decision, Fleet, PoolController
from .load_watch import LoadWatch
from .options import SteeringOptions
from .pool_use import PoolUse


class Steering:
    """``note`` every request that ends, ``look`` every ``options.every_s``."""

    def __init__(self, options: SteeringOptions, profile: Profile | None) -> None:
        self.options = options
        self._watch, self._use = LoadWatch(options), PoolUse(options.work_off_s)
        self._in_use: dict[Role, float] = {}
        self.controller = PoolController(options, profile)

    def note(self, request: Request, ended: Ended, now: float) -> None:
        """A request is over."""
        self._watch.note(request, ended, now)

    def look(self, lifecycle: Lifecycle, now: float) -> list[Decision]:
        """What is to be done. Flips are carried out by ``Lifecycle.flip``, where the mode is act."""
        self._in_use = self._use.look(lifecycle.pools.workers.values(), now)
        fleet = replace(fleet_of(lifecycle, self.options.keep), in_use=self._in_use)
        return self.controller.decide(self._watch.look(lifecycle.requests.values(), now), fleet, now)

    def as_json(self, now: float) -> dict[str, Any]:
        """For /debug/state and the dashboard."""
        controller = self.controller
        pressure, picture = controller.pressure, controller.picture
        return {
            "mode": self.options.mode,
            "state": controller.state,
            "load": None if pressure is None else {"prefill": round(pressure.prefill, 3), "decode": round(pressure.decode, 3)},
            "mix": None if picture is None else {name: round(value, 4) for name, value in asdict(picture).items()},
            "in_use": {role: round(use, 3) for role, use in self._in_use.items()},
            "wanted_workers": controller.wanted,
            "decisions": [
                {"ago_s": round(now - d.at, 1), **{k: v for k, v in asdict(d).items() if k != "at"}} for d in reversed(controller.decisions)
            ],
        }


def fleet_of(lifecycle: Lifecycle, keep: Sequence[str] = ()) -> Fleet:
    """Who takes new work, and who of those could change its role, or go: not those whose name is in ``keep`` or of a pattern there."""
    pools = lifecycle.pools
    mixed = [w for w in pools.open_of_role("decode") if w.hello.mixed]
    prefills, decodes = ([w for w in pools.open_of_role(role) if not w.hello.mixed] for role in ("prefill", "decode"))
    by_load: dict[Role, list[Worker]] = {"prefill": _by_load(prefills), "decode": _by_load(decodes)}
    changing = lifecycle.flips.under_way
    return Fleet(
        len(prefills),
        len(decodes),
        {role: _flexible(workers, changing) for role, workers in by_load.items()},
        sum(record.began_s is None for record in changing.values()),
        min((w.hello.max_batch_tokens for w in prefills), default=512),
        min((w.hello.max_num_seqs for w in decodes), default=64),
        {role: going[0] for role, workers in by_load.items() if len(workers) > 1 and (going := _may_go(workers, keep))},
        len(mixed),
    )


def _may_go(workers: list[Worker], keep: Sequence[str]) -> list[str]:
    names = [(w.hello.worker_id, w.hello.process or w.hello.worker_id) for w in workers]
    return [worker_id for worker_id, name in names if not any(fnmatchcase(name, pattern) for pattern in keep)]


def _by_load(workers: list[Worker]) -> list[Worker]:
    """Those with least to do first."""
    return sorted(workers, key=lambda w: (len(w.dispatches), w.id))


def _flexible(workers: list[Worker], changing: Mapping[str, FlipRecord]) -> list[str]:
    return [w.hello.process for w in workers if w.hello.process and w.hello.process not in changing]
