"""A peer is given up only after its patience, counted from when it was last wanted."""

from __future__ import annotations

from splitserve.transport.handoff.reachability import Reachability, ReachTimes

PEER, TIMES = ("d0", 1), ReachTimes(beyond_reach=1.0, first_contact=5.0, forgotten=300.0)


def reachability(wanted_at: float) -> Reachability:
    reachability = Reachability(TIMES)
    reachability.wanted(PEER, wanted_at)
    return reachability


def test_a_peer_that_is_connected_is_never_given_up() -> None:
    assert reachability(0.0).judge(PEER, None, True, 1e6) == "here"


def test_the_first_connection_may_take_longer_than_a_lost_one() -> None:
    known = reachability(0.0)
    assert [known.judge(PEER, 10.0, True, now) for now in (10.9, 11.1)] == ["here", "lost"]
    assert [known.judge(PEER, 10.0, False, now) for now in (14.9, 15.1)] == ["here", "lost"]


def test_patience_counts_from_when_it_was_last_wanted() -> None:
    """It had been away for a minute when the prompt came: it may be about to come back."""
    known = reachability(0.0)
    assert known.judge(PEER, 10.0, True, 70.0) == "lost"
    known.wanted(PEER, 70.0)
    assert [known.judge(PEER, 10.0, True, now) for now in (70.9, 71.1)] == ["here", "lost"]


def test_a_peer_that_stays_away_is_forgotten() -> None:
    assert [reachability(0.0).judge(PEER, 10.0, True, now) for now in (309.0, 311.0)] == ["lost", "forgotten"]
