"""Which workers hang, and which are only starting, restarted, or unknown."""

from __future__ import annotations

from splitserve.deploy.restart import HungWatch


def test_a_worker_that_was_known_and_is_not_any_more_is_hung_after_a_while() -> None:
    watch = HungWatch(patience_s=10)
    assert watch.hung({"a", "b"}, {"a": 1, "b": 2}, 0.0) == []
    assert watch.hung({"b"}, {"a": 1, "b": 2}, 9.0) == []
    assert watch.hung({"b"}, {"a": 1, "b": 2}, 10.0) == ["a"]
    assert watch.hung({"b"}, {"a": 1, "b": 2}, 11.0) == [], (
        "it is told once, however long its process takes to end"
    )


def test_a_worker_that_is_still_starting_is_not() -> None:
    watch = HungWatch(patience_s=10)
    for now in range(100):
        assert watch.hung(set(), {"a": 1}, float(now)) == []


def test_a_restarted_worker_begins_anew() -> None:
    watch = HungWatch(patience_s=10)
    watch.hung({"a"}, {"a": 1}, 0.0)
    assert watch.hung(set(), {"a": 7}, 50.0) == []
