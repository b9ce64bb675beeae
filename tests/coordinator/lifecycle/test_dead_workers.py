"""Which workers are believed dead, how soon, and that a stall of the coordinator's own is nobody's death. In
virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from support.lifecycle_bench import Bench, ends, sent

from splitserve.coordinator.lifecycle.actions import Action, Send
from splitserve.transport.messages.messages import Alive, Cancel, Fenced, FirstToken, Load, Prefill, Welcome


def test_a_stream_that_runs_needs_its_prefill_worker_no_more_even_if_that_reports_last() -> None:
    bench = Bench()
    bench.submit()
    bench.joined(1)
    bench.first(1)
    bench.hello("p2", "prefill")
    assert not sent(bench.core.process_ended(("p", 1), bench.now), Prefill)


def test_a_silent_decode_worker_is_dead_and_its_request_goes_on() -> None:
    bench = Bench()
    bench.submit()
    bench.first(1)
    bench.joined(1)
    bench.hello("d2", "decode")
    bench.now = 1.0
    bench.load("p", [])
    bench.send("d2", Load(**_idle("d2")))
    bench.now = 2.0
    actions = bench.core.tick(bench.now)
    (again,) = sent(actions, Prefill)
    assert again.decode.worker_id == "d2"
    assert [f.reason != "" for f in sent(bench.load("d", [1]), Fenced)] == [True]  # should it come back


def test_a_worker_whose_process_has_ended_gets_no_new_work() -> None:
    """It was dispatched to until its last messages had been read, and its death charged to those requests."""
    bench = Bench()
    bench.core.process_ending(("p", 1))
    assert not sent(bench.submit(), Prefill)
    bench.hello("p2", "prefill")
    assert [request.route[0] for request in bench.core.requests.values()] == ["p2"]


def test_of_a_worker_whose_end_is_known_silence_says_nothing_more() -> None:
    """A coordinator that stalls between the notice of the end and its handling still names the cause."""
    bench = Bench()
    bench.submit()
    bench.first(1)
    bench.joined(1)
    bench.hello("d2", "decode")
    bench.core.pools.reached(("d", 1), False, bench.now)
    bench.core.process_ending(("d", 1))
    bench.now = 1.0
    bench.load("p", [])
    bench.send("d2", Load(**_idle("d2")))
    bench.now = 2.0
    assert not sent(bench.core.tick(bench.now), Prefill)
    (again,) = sent(bench.core.process_ended(("d", 1), bench.now), Prefill)
    assert again.decode.worker_id == "d2"
    assert bench.core.pools.reasons_lost[("d", 1)] == "its process has ended; requests it had a part in: 1"


def _idle(name: str) -> dict[str, Any]:
    numbers = (
        "blocks_cached",
        "blocks_used",
        "blocks_leased",
        "num_running",
        "num_waiting",
        "num_waiting_tokens",
        "steps",
    )
    return {
        "worker_id": name,
        "incarnation": 1,
        "blocks_free": 50,
        "busy": False,
        "accepting": True,
        **dict.fromkeys(numbers, 0),
    }


def test_a_busy_worker_without_progress_is_dead() -> None:
    bench = Bench(progress_timeout_s=5.0)
    bench.submit()
    for _ in range(30):
        bench.now += 0.2
        bench.load("p", [1], steps=3, busy=True)
        bench.load("d", [1])
        bench.core.tick(bench.now)
    assert [w.role for w in bench.core.pools.workers.values()] == ["decode"]
    assert len(bench.core.queue) == 1  # until a prefill worker comes


def test_a_worker_that_says_nothing_is_silent_and_not_busy() -> None:
    bench = Bench(progress_timeout_s=3.0, dead_after_s=4.0)
    bench.load("p", [], steps=3, busy=True)
    bench.load("d", [])
    for _ in range(39):
        bench.now += 0.1
        bench.core.tick(bench.now)
    assert len(bench.core.pools.workers) == 2
    bench.now += 0.2
    bench.core.tick(bench.now)
    assert [reason.partition(" for ")[0] for reason in bench.core.pools.reasons_lost.values()] == [
        "silent",
        "silent",
    ]


def test_a_worker_whose_connection_is_gone_is_dead_sooner_unless_it_comes_back() -> None:
    bench = Bench(dead_after_s=5.0, unreachable_s=0.25)
    asked: list[Action] = []

    def later(seconds: float) -> None:
        bench.now += seconds
        asked.extend(bench.core.tick(bench.now))

    for broken in (False, True):
        bench.load("p", [])
        bench.load("d", [])
        later(0.15)
        assert not asked
        later(0.16)  # its heartbeat is overdue: it is spoken to
        assert [a.worker[0] for a in asked if isinstance(a, Send) and isinstance(a.message, Alive)] == [
            "p",
            "d",
        ]
        bench.core.pools.reached(("d", 1), False, bench.now)
        later(0.2)
        bench.core.pools.reached(("d", 1), not broken, bench.now)
        later(0.1)
        assert (("d", 1) in bench.core.pools.workers) == (not broken)
        asked.clear()
    assert "its connection is gone" in bench.core.pools.reasons_lost[("d", 1)]


def _found_dead_after(phase: float, reported: bool) -> float:
    """Seconds from the end of worker d's process, on another host, until its requests go elsewhere.
    ``phase``: of its heartbeats, and of the coordinator's ticks; ``reported``: ZeroMQ reports that some
    connection has ended."""
    bench = Bench()
    killed, heartbeat, tick = 2.0, 0.25 * phase, 0.05 * ((7 * phase) % 1)
    while ("d", 1) in bench.core.pools.workers:
        assert bench.now < killed + 5
        bench.now = min(heartbeat, tick)
        if bench.now == heartbeat:
            bench.load("p", [])
            if bench.now < killed:
                bench.load("d", [])
            heartbeat += 0.25
        else:
            if reported and killed <= bench.now < killed + 0.05:
                bench.core.connection_lost()
            for sends in bench.core.tick(bench.now):
                if isinstance(sends, Send):
                    too_early = bench.now < killed + 0.002  # ZeroMQ has not taken the connection down yet
                    bench.core.pools.reached(sends.worker, sends.worker[0] == "p" or too_early, bench.now)
            tick += 0.05
    assert ("p", 1) in bench.core.pools.workers
    return bench.now - killed


def test_a_killed_worker_of_another_host_is_found_within_0_4_s() -> None:
    """In virtual time with the ordinary limits, whenever it dies. (On the coordinator's host its end is seen
    at once.) Without word of a lost connection it is 0.65 s: a heartbeat has to be late first."""
    phases = [i / 97 for i in range(97)]
    assert 0.25 < max(_found_dead_after(phase, reported=True) for phase in phases) <= 0.4
    assert 0.5 < max(_found_dead_after(phase, reported=False) for phase in phases) <= 0.65


def test_whose_connection_comes_back_in_time_is_not_dead() -> None:
    bench = Bench(dead_after_s=5.0)
    bench.core.connection_lost()
    for spoken in (False, False, False, True, True, True, True, True):
        bench.now += 0.05
        sends = [a for a in bench.core.tick(bench.now) if isinstance(a, Send)]
        assert sends or bench.now > 0.2, "until it is reached again it is spoken to"
        for send in sends:
            bench.core.pools.reached(send.worker, send.worker[0] == "p" or spoken, bench.now)
    assert len(bench.core.pools.workers) == 2


def test_a_coordinator_that_stands_still_just_as_a_connection_ends_finds_out_whose() -> None:
    """Its earlier messages seemed to reach every worker, and it has no reason to send: no heartbeat is due
    for hours."""
    bench = Bench(heartbeat_s=9000.0, dead_after_s=9000.0)
    bench.core.connection_lost()
    for seconds in (0.0, 3.0, *[0.05] * 10):
        bench.now += seconds
        for sends in bench.core.tick(bench.now):
            if isinstance(sends, Send):
                bench.core.pools.reached(sends.worker, sends.worker[0] == "p" or bench.now == 0.0, bench.now)
    assert set(bench.core.pools.workers) == {("p", 1)}


def test_the_coordinators_own_stall_is_nobodys_silence() -> None:
    bench = Bench()
    bench.core.tick(bench.now)
    bench.now = 10.0
    bench.core.tick(bench.now)
    assert len(bench.core.pools.workers) == 2


@pytest.mark.parametrize(
    ("stall_s", "away_s", "lives"), [(0.0, 0.4, False), (5.0, 1.9, True), (5.0, 2.4, False)]
)
def test_connections_that_a_stall_ended_have_time_to_come_back(
    stall_s: float, away_s: float, lives: bool
) -> None:
    """A worker of another host connects again within 1.05 s; 0.25 s, as ever, would cost it its work."""
    bench = Bench()
    bench.core.tick(bench.now)
    bench.now += stall_s
    back = bench.now + away_s
    while bench.now < back:
        bench.core.tick(bench.now)
        bench.core.pools.reached(("d", 1), False, bench.now)
        bench.now += 0.05
    assert (("d", 1) in bench.core.pools.workers) == lives


@pytest.mark.parametrize("silent", ["p", "d"])
def test_a_silent_worker_has_lost_nothing_until_it_is_dead(silent: str) -> None:
    """A worker that got no processor for some seconds, and was allowed to, used to be four "lost" attempts in
    a row: status 500."""
    bench = Bench(dead_after_s=60.0)
    bench.submit()
    bench.load("p", [])
    bench.load("d", [])
    if silent == "d":
        bench.first(1)
    actions: list[Action] = []
    while bench.now < 20:
        bench.now += 0.2
        actions += bench.load("d" if silent == "p" else "p", [])
        actions += bench.core.tick(bench.now)
    assert not ends(actions)
    assert not sent(actions, Prefill)
    assert not sent(actions, Cancel)
    actions = bench.load("p", []) + bench.load("d", [])  # now it speaks, and does not know of it
    (again,) = sent(actions + bench.core.tick(bench.now), Prefill)
    assert again.spec.epoch == 1


def test_a_restarted_worker_replaces_itself() -> None:
    bench = Bench()
    bench.submit()
    actions = bench.hello("p", "prefill", incarnation=2)
    assert len(sent(actions, Welcome)) == 1
    assert len(sent(actions, Prefill)) == 1
    assert (
        bench.send("p", FirstToken(coordinator=7, dispatch=1, index=0, token=5)) != []
    )  # the old incarnation: fenced
    assert len(bench.core.requests) == 1


def test_a_worker_that_comes_back_with_its_node_leaves_its_successor_alone() -> None:
    bench = Bench()
    bench.submit()
    stale = bench.hello("p", "prefill", incarnation=2, host="lost")
    assert not sent(stale, Welcome)
    [refusal] = sent(stale, Alive)
    assert refusal.misfit == "a worker on h has the name p, and lives"
    assert not sent(bench.first(1), Fenced), "the request goes on where it is"
    bench.now += 2.0
    bench.load("d", [])
    bench.core.tick(bench.now)
    assert sent(bench.hello("p", "prefill", incarnation=2, host="lost"), Welcome), "once that one is dead"


def test_a_silent_worker_is_dead_after_a_while_also_with_heartbeats_quicker_than_ticks() -> None:
    bench = Bench(heartbeat_s=0.01, dead_after_s=0.5)
    for _ in range(9):
        bench.now += 0.06
        bench.load("d", [])
        bench.core.tick(bench.now)
    assert list(bench.core.pools.reasons_lost) == [("p", 1)]
