"""What an oracle reaches that learns of a change of mix ``--delay`` seconds after it, and pays for its flips.

    python -m splitserve.bench.studies.steer_late --loads 1000 7000 --data ../shared/data [--delay 10]

It serves those loads of ``steer_loads`` on which the oracle moves (``--missed``: and the controller has less
than ``GOAL`` of it), and writes into their rows. The parts are the oracle's, but workers are the controller's
in the sketch: with all that is left of the part before, and they change their roles as its workers do.
``--delay`` after its beginning it knows all requests of a part. It then takes the ratio, or the ratio for
``TURN_S`` and another one, with which most requests so far will be good; or it leaves the ratio as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from ...coordinator.lifecycle.snapshot import Snapshot
from ...planner.simulator.simulation import WARM_UP_S
from ...steering.fleet import Decision
from ...steering.steering import Steering, fleet_of
from ...transport.messages.messages import Role
from ..environment import option_parser
from .random_loads import NUM_WORKERS, OPTIONS, RandomLoad, drawn
from .steer_loads import RECORD, read, sketched, write

GOAL = 0.93
TURN_S = 15.0

Course = tuple[tuple[float, int], ...]
"""Seconds of the load, and the prefill workers that there should be from then on."""


class Scripted(Steering):
    def __init__(self, course: Course) -> None:
        super().__init__(OPTIONS, None)
        self._course = course

    def look(self, snapshot: Snapshot, now: float) -> list[Decision]:
        fleet = fleet_of(snapshot)
        due = [ratio for at, ratio in self._course if WARM_UP_S + at <= now]
        if not due or fleet.changing or not (missing := due[-1] - fleet.prefill):
            return []
        role: Role = "prefill" if missing > 0 else "decode"
        other: Role = "decode" if missing > 0 else "prefill"
        return [Decision(now, "flip", name, role, "") for name in fleet.flexible[other][: abs(missing)]]


def goes_on(course: Course, at: float) -> Iterator[Course]:
    """Ways to go on from ``at``."""
    yield course
    ratios = range(1, NUM_WORKERS)
    for first, then in product(ratios, ratios):
        yield (*course, (at, first), *(((at + TURN_S, then),) if then != first else ()))


def late(load: RandomLoad, delay_s: float) -> float:
    """Return the share of good requests."""
    course, begins, good = Course(), load.requests[0].arrival_s, 0.0
    since = begins
    for end in [*load.parts[:-1], 1e9]:
        so_far = tuple(r for r in load.requests if r.arrival_s < end)
        if so_far and since - begins + delay_s < so_far[-1].arrival_s:
            tried = {
                way: sketched(so_far, load.prefill, Scripted(way))
                for way in goes_on(course, since - begins + delay_s)
            }
            course = max(tried, key=tried.__getitem__)
            good = tried[course]
        since = end
    return good / len(load.requests)


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--loads", type=int, nargs=2, required=True, help="from this number to before that")
    parser.add_argument("--delay", type=int, default=10, help="seconds after a change of mix")
    parser.add_argument("--missed", action="store_true", help="only loads that the controller misses")
    parser.add_argument("--data", type=Path, help="folder with azure, mooncake and servegen")
    parser.add_argument("--record", type=Path, default=RECORD, help="rows are added to it")
    options = parser.parse_args()
    rows = read(options.record)
    for number in range(*options.loads):
        row = rows.get(number)
        if not row or not row["oracle"]:
            continue
        if options.missed and row["steered"]["present"] >= GOAL * row["oracle"]:
            continue
        if load := drawn(number, options.data):
            row.setdefault("late", {})[str(options.delay)] = round(late(load, options.delay), 4)
    write(options.record, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
