"""One coordinator's steering: from the lifecycle's snapshot to the pool controller's decisions. Pure; times
in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from ..coordinator.lifecycle.snapshot import FinishedRequest, Snapshot, WorkerState
from ..engine.latency_profile import Profile
from ..transport.messages.messages import Role
from .controller import PoolController
from .fleet import Decision, Fleet
from .load_watch import LoadWatch
from .options import SteeringOptions
from .pool_use import ROLES, PoolUse
from .speeds import Speed, Speeds


class Steering:
    """Call ``note`` for every request that ends, and ``look`` every ``options.every_s`` seconds."""

    def __init__(self, options: SteeringOptions, profile: Profile | None) -> None:
        self.options = options
        self._watch, self._use = LoadWatch(options), PoolUse(options.work_off_s)
        self._in_use: dict[Role, float] = {}
        self._speed: dict[str, Speed] = {}
        self._speeds = Speeds(options, profile)
        self.controller = PoolController(options, profile)

    def note(self, request: FinishedRequest, now: float) -> None:
        """Take in a request that is over."""
        self._watch.note(request, now)

    def look(self, snapshot: Snapshot, now: float) -> list[Decision]:
        """Return what should be done; the caller carries it out."""
        self._in_use = self._use.look(snapshot.workers, now)
        picture = self._watch.look(snapshot.requests, now)
        self._speed = self._speeds.look(snapshot.workers, picture, now)
        fleet = replace(fleet_of(snapshot, self.options.keep, self._speed), in_use=self._in_use)
        return self.controller.decide(picture, fleet, now)

    def as_json(self, now: float) -> dict[str, Any]:
        """For /debug/state and the dashboard."""
        controller = self.controller
        pressure, picture = controller.pressure, controller.picture
        return {
            "mode": self.options.mode,
            "state": controller.state,
            "load": None
            if pressure is None
            else {"prefill": round(pressure.prefill, 3), "decode": round(pressure.decode, 3)},
            "mix": None
            if picture is None
            else {name: round(value, 4) for name, value in asdict(picture).items()},
            "in_use": {role: round(use, 3) for role, use in self._in_use.items()},
            "speeds": {
                name: {r: round(x, 2) for r, x in s._asdict().items()} for name, s in self._speed.items()
            },
            "wanted_workers": controller.wanted,
            "decisions": [
                {"ago_s": round(now - d.at, 1), **{k: v for k, v in asdict(d).items() if k != "at"}}
                for d in reversed(controller.decisions)
            ],
        }


def fleet_of(
    snapshot: Snapshot, keep: Sequence[str] = (), speeds: Mapping[str, Speed] = MappingProxyType({})
) -> Fleet:
    """Return the workers that take new work, and those of them that could change role or leave.

    A worker whose name matches a pattern in ``keep`` never leaves.
    """
    takes_work = [w for w in snapshot.workers if w.is_open]
    by_load: dict[Role, list[WorkerState]] = {role: _by_load(takes_work, role) for role in ROLES}
    return Fleet(
        len(by_load["prefill"]),
        len(by_load["decode"]),
        {role: _flexible(role, workers, snapshot.changing, speeds) for role, workers in by_load.items()},
        sum(not has_begun for has_begun in snapshot.changing.values()),
        min((w.max_batch_tokens for w in by_load["prefill"]), default=512),
        min((w.max_num_seqs for w in by_load["decode"]), default=64),
        {
            role: going
            for role, workers in by_load.items()
            if (going := _may_go(workers, keep)[: len(workers) - 1])
        },
        sum(w.is_mixed and w.role == "decode" for w in takes_work),
        speeds={role: [_speed(w, speeds) for w in workers] for role, workers in by_load.items()},
    )


def _may_go(workers: list[WorkerState], keep: Sequence[str]) -> list[str]:
    names = [(w.worker_id, w.process or w.worker_id) for w in workers]
    return [worker_id for worker_id, name in names if not any(fnmatchcase(name, pattern) for pattern in keep)]


def _by_load(workers: list[WorkerState], role: Role) -> list[WorkerState]:
    """Return the workers of one role, those with the fewest dispatches first."""
    of_role = [w for w in workers if w.role == role and not w.is_mixed]
    return sorted(of_role, key=lambda w: (w.num_dispatches, w.worker_id))


def _speed(worker: WorkerState, speeds: Mapping[str, Speed]) -> Speed:
    return speeds.get(worker.process or worker.worker_id, Speed())


def _flexible(
    role: Role, workers: list[WorkerState], changing: Mapping[str, bool], speeds: Mapping[str, Speed]
) -> list[str]:
    """Return the processes, those first that suit the other role best."""
    found = [w for w in workers if w.process and w.process not in changing]
    sign = 1 if role == "prefill" else -1
    return [w.process for w in sorted(found, key=lambda w: sign * _speed(w, speeds).suits_prefill)]
