"""How often a request is tried again: what fails by itself, and what only the network is to blame for."""

from __future__ import annotations

from typing import Literal

from support.lifecycle_bench import Bench, ends

from splitserve.transport.messages.messages import RequestFailed


def fail(bench: Bench, dispatch: int, kind: Literal["handoff_failed", "internal"]) -> list[str]:
    """This attempt fails, and four seconds go by: what ended it, if anything did."""
    failed = RequestFailed(
        coordinator=7, dispatch=dispatch, kind=kind, message="1 KV blocks arrived corrupt twice"
    )
    ended = [e.message for e in ends(bench.send("p", failed))]
    bench.now += 4.0
    bench.load("p", [])
    bench.load("d", [])
    return ended


def test_a_network_in_trouble_is_waited_for_longer() -> None:
    """Seven handoffs in a row may fail, over 13 s and more; chaos lost streams to a storm of three
    seconds."""
    bench = Bench(max_attempts=4, dead_after_s=9000.0)
    bench.submit()
    assert [fail(bench, dispatch, "handoff_failed") for dispatch in range(1, 7)] == [[]] * 6
    (message,) = fail(bench, 7, "handoff_failed")
    assert "gave up after 7 failed attempts" in message


def test_what_fails_by_itself_is_not() -> None:
    bench = Bench(max_attempts=4, dead_after_s=9000.0)
    bench.submit()
    assert [fail(bench, dispatch, "handoff_failed") for dispatch in range(1, 4)] == [[]] * 3
    (message,) = fail(bench, 4, "internal")
    assert "gave up after 4 failed attempts" in message
