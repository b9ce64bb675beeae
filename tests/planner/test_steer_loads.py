"""The random loads of the pool controller are those of the record."""

from __future__ import annotations

from splitserve.bench.studies.random_loads import drawn
from splitserve.bench.studies.steer_loads import RECORD, left_alone, read


def test_a_load_is_drawn_and_served_as_it_was_recorded() -> None:
    load, recorded = drawn(2), read(RECORD)[2]
    assert load is not None
    again = left_alone(load)
    assert {name: recorded[name] for name in again if name not in ("steered", "changes")} == {
        name: value for name, value in again.items() if name not in ("steered", "changes")
    }
