"""How long a stream stood still because its attempt was lost, and what that time went into."""

from __future__ import annotations

from support.lifecycle_bench import Bench, tokens

from splitserve.transport.messages.messages import RequestFailed


def test_how_long_a_lost_workers_stream_stood_still_is_booked_by_stage() -> None:
    bench = Bench()
    bench.submit()
    bench.first(1)
    bench.joined(1)
    bench.step(1, 1, 6)
    bench.hello("d2", "decode")
    bench.now = 2.0
    bench.core.process_ended(("d", 1), bench.now)
    assert not bench.core.outcomes.last_recoveries, "it has not gone on yet"
    bench.now = 2.5
    assert tokens(bench.first(2, 7, index=2, queue_s=0.1, prefill_s=0.3)) == [7]
    (recovery,) = bench.core.outcomes.last_recoveries
    assert recovery.reason == "decode worker d was lost (its process has ended)"
    assert (recovery.noticed, recovery.dispatched, recovery.token) == (2.0, 2.0, 2.5)
    assert (recovery.queue_s, recovery.prefill_s, recovery.num_tokens, recovery.num_attempts) == (
        0.1,
        0.3,
        5,
        1,
    )
    assert recovery.absent_s == 0.0
    assert tokens(bench.joined(2, 7, index=2, worker="d2")) == []
    bench.step(2, 3, 8, worker="d2")
    counters = bench.core.counters()
    assert (counters["recoveries"], counters["recovery_seconds"]) == (1, 0.5)


def test_a_lost_attempt_whose_successor_fails_too_is_one_recovery() -> None:
    bench = Bench()
    bench.submit()
    bench.now = 1.0
    bench.send("p", RequestFailed(coordinator=7, dispatch=1, kind="internal", message="no"))
    bench.now = 2.0
    bench.send("p", RequestFailed(coordinator=7, dispatch=2, kind="preempted", message="again"))
    bench.now = 3.0
    bench.joined(3)
    (recovery,) = bench.core.outcomes.last_recoveries
    assert (
        recovery.reason,
        recovery.noticed,
        recovery.dispatched,
        recovery.token,
        recovery.num_attempts,
    ) == ("no", 1.0, 2.0, 3.0, 2)


def test_a_recovery_tells_how_long_there_was_no_worker_at_all() -> None:
    bench = Bench()
    bench.submit()
    bench.first(1)
    bench.joined(1)
    bench.core.process_ended(("d", 1), 1.0)
    bench.now = 3.0
    bench.hello("d", "decode", incarnation=2)
    bench.now = 3.5
    bench.first(2, 7, index=1)
    (recovery,) = bench.core.outcomes.last_recoveries
    assert (recovery.noticed, recovery.absent_s, recovery.dispatched, recovery.token) == (1.0, 2.0, 3.0, 3.5)
