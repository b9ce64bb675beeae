"""The dashboard's log: what went wrong or changed, and when."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.coordinator.dashboard.event_log import NUM_EVENTS, EventLog
from splitserve.coordinator.lifecycle.membership import DRAINED
from splitserve.coordinator.metrics.system_snapshot import SystemSnapshot, WorkerSnapshot


def system(
    *names: str,
    ready: bool = True,
    reasons: dict[str, str] | None = None,
    retries: Sequence[str] = (),
    pid: int = 1,
) -> SystemSnapshot:
    workers = [
        WorkerSnapshot(name, name.partition("-")[0], 1, 1, 0, 0, 0, 0, 0, 0, 0, pid=pid) for name in names
    ]
    return SystemSnapshot(ready=ready, workers=workers, reasons_lost=reasons or {}, last_retries=retries)


def reported(log: EventLog) -> list[tuple[str, str]]:
    return [(event["kind"], event["text"]) for event in log.newest()]


def test_workers_come_and_go_and_the_reason_is_named() -> None:
    log = EventLog(wall=1000.0)
    log.note(0.0, system("prefill-0", ready=False), {}, {})
    log.note(2.0, system("prefill-0", "decode-0", "decode-1"), {}, {})
    log.note(4.0, system("prefill-0", "decode-1", reasons={"decode-0": "silent for 1.5 s"}), {}, {})
    log.note(6.0, system("prefill-0", ready=False, reasons={"decode-1": DRAINED}), {}, {})
    assert reported(log) == [
        ("worker", "decode-0, decode-1 joined"),
        ("ready", "ready"),
        ("lost", "decode-0 lost: silent for 1.5 s"),
        ("worker", "decode-1 drained and left"),
        ("ready", "not ready any more"),
    ]
    assert log.newest()[2]["t"] == 1004.0
    assert log.totals["lost"] == 1
    assert log.lost_since(3.0) == ["decode-0 (silent for 1.5 s)"]
    assert log.lost_since(5.0) == []


def test_a_worker_that_restarts_between_two_looks_was_lost() -> None:
    log = EventLog(0.0)
    log.note(0.0, system("decode-0", pid=1), {}, {})
    log.note(2.0, system("decode-0", pid=2, reasons={"decode-0": "restarted"}), {}, {})
    assert reported(log) == [("lost", "decode-0 lost: restarted"), ("worker", "decode-0 joined")]


def test_many_workers_are_counted_by_role() -> None:
    log = EventLog(0.0)
    log.note(0.0, system(), {}, {})
    log.note(2.0, system(*[f"prefill-{i}" for i in range(64)], *[f"decode-{i}" for i in range(64)]), {}, {})
    assert reported(log) == [("worker", "64 decode workers and 64 prefill workers joined")]


def test_what_goes_on_is_one_event_and_what_comes_again_is_another() -> None:
    log = EventLog(0.0)
    grown = {"redispatches": 2.0, "recoveries": 1.0, "preemptions": 3.0}
    log.note(0.0, system(retries=["r1 in decode: lost"]), grown, {"429": 5, "503": 1})
    log.note(2.0, system(), {}, {"429": 7, "400": 9})
    assert [(e["kind"], e["count"], e["for_s"], e["detail"]) for e in log.newest()] == [
        ("retry", 2, 0.0, "r1 in decode: lost"),
        ("recovery", 1, 0.0, ""),
        ("preempted", 3, 0.0, ""),
        ("failed", 1, 0.0, ""),
        ("refused", 12, 2.0, ""),
    ]
    assert log.newest()[-1]["text"] == "12 requests refused (429)"
    log.note(60.0, system(), {}, {"429": 1})
    assert reported(log)[-2:] == [
        ("refused", "12 requests refused (429)"),
        ("refused", "1 request refused (429)"),
    ]
    counted = {"retry": 2, "recovery": 1, "refused": 13, "failed": 1, "borrowed": 0, "preempted": 3}
    assert log.totals == {**counted, "lost": 0}


def test_it_stays_small() -> None:
    log = EventLog(0.0)
    for number in range(1000):
        log.note(60.0 * number, system("prefill-0", ready=number % 2 == 0), {"redispatches": 1.0}, {"429": 1})
    assert len(log.newest()) == NUM_EVENTS
    log.note(60_001.0, system("prefill-0"), {}, {"429": 1})


def test_what_is_borrowed_is_counted() -> None:
    log = EventLog(0.0)
    log.note(0.0, system(), {}, {})
    log.note(2.0, system(), {"borrowed_prompts": 2.0, "borrowed_sequences": 1.0}, {})
    assert reported(log) == [("borrowed", "3 requests borrowed from the other pool")]
