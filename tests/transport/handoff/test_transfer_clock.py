"""How fast a mover is, as the worker sees it."""

from __future__ import annotations

from splitserve.transport.handoff.layer_slicing import SETTLED_BYTES, TransferClock

PEER = ("decode-0", 1)


def test_a_burst_lasts_until_nothing_is_pending() -> None:
    clock = TransferClock()
    clock.put(PEER, SETTLED_BYTES, 10.0)
    clock.put(PEER, SETTLED_BYTES, 10.5)
    assert clock.settled(PEER, 12.0) == (2 * SETTLED_BYTES, 2.0)
    assert clock.settled(PEER, 13.0) is None
    assert (clock.num_bytes, clock.seconds) == (2 * SETTLED_BYTES, 2.0)


def test_a_small_burst_counts_but_tells_nothing() -> None:
    clock = TransferClock()
    clock.put(PEER, 100, 10.0)
    assert clock.settled(PEER, 11.0) is None
    assert clock.num_bytes == 100


def test_a_failed_burst_is_forgotten() -> None:
    clock = TransferClock()
    clock.put(PEER, SETTLED_BYTES, 10.0)
    clock.forget(PEER)
    assert clock.settled(PEER, 11.0) is None
    assert clock.num_bytes == 0
