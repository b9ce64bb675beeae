"""The random loads of the pool controller are those of the record."""

from __future__ import annotations

import pytest

from splitserve.bench.studies.random_loads import drawn
from splitserve.bench.studies.steer_loads import HARM, RECORD, left_alone, read, served


def test_a_load_is_drawn_and_served_as_it_was_recorded() -> None:
    load, recorded = drawn(2), read(RECORD)[2]
    assert load is not None
    again = left_alone(load)
    assert {name: recorded[name] for name in again if name not in ("steered", "changes")} == {
        name: value for name, value in again.items() if name not in ("steered", "changes")
    }


@pytest.mark.parametrize("number", [3048, 1124])
def test_leaving_alone_is_not_charged_with_what_following_has_left_behind(number: int) -> None:
    """Else these are followed again and again, and lose 3 points."""
    load = drawn(number)
    assert load is not None
    alone, steered = (served(load.requests, load.prefill, steered=steers)[0] for steers in (False, True))
    assert steered > alone - HARM * len(load.requests)


def test_workers_that_borrow_and_flip_serve_what_flips_alone_do_not() -> None:
    """Phases of 10 to 30 s: flips come too late, and leave crowded workers behind (65 to 70% good)."""
    load = drawn(3320)
    assert load is not None
    good, changes = served(load.requests, load.prefill, steered=True, full=True, borrow=True)
    assert good > 0.8 * len(load.requests)
    assert changes
