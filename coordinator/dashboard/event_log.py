"""What went wrong, or changed, and when: read from two looks at the system. Pure; times in seconds.

kind       level  event
worker     info   a worker joined, or left in good order
lost       bad    a worker is gone without a word
ready      info   the system became ready; bad: it is not any more
retry      warn   requests were dispatched again
recovery   good   such requests had their next token
refused    warn   requests were answered with 429
failed     bad    requests were answered with 5xx
borrowed   info   workers took requests of the other pool, which had no room
preempted  warn   sequences left a decode worker's batch for lack of KV blocks
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..lifecycle.membership import DRAINED
from ..metrics.system_snapshot import SystemSnapshot, WorkerSnapshot

Level = Literal["good", "info", "warn", "bad"]
NUM_EVENTS = 60
JOIN_S = 10.0
"""Events of one kind that are counted become one where no more time lies between them."""
COUNTED: Mapping[str, tuple[Level, str, str]] = {
    "retry": ("warn", "request was dispatched again", "requests were dispatched again"),
    "recovery": ("good", "request recovered", "requests recovered"),
    "refused": ("warn", "request refused (429)", "requests refused (429)"),
    "failed": ("bad", "request failed (5xx)", "requests failed (5xx)"),
    "borrowed": ("info", "request borrowed from the other pool", "requests borrowed from the other pool"),
    "preempted": (
        "warn",
        "sequence preempted for lack of KV blocks",
        "sequences preempted for lack of KV blocks",
    ),
}
MAX_NAMED = 5
"""Workers that come or go at once are named up to this number."""


class EventLog:
    """``wall``: what to add to a time to have seconds since 1970."""

    def __init__(self, wall: float) -> None:
        self._wall = wall
        self._events: deque[dict[str, Any]] = deque(maxlen=NUM_EVENTS)
        self._last: dict[str, dict[str, Any]] = {}  # the newest counted event, by kind
        self._known: SystemSnapshot | None = None
        self.totals = dict.fromkeys((*COUNTED, "lost"), 0)
        """Since the start."""
        self._lost: deque[tuple[float, str]] = deque(maxlen=MAX_NAMED)

    def note(
        self, now: float, system: SystemSnapshot, grown: Mapping[str, float], refusals: Mapping[str, int]
    ) -> None:
        """What happened since the last call. ``grown``: the lifecycle's and the workers' counters;
        ``refusals``: by status."""
        if self._known is not None:
            self._membership(now, self._known, system)
            if system.ready != self._known.ready:
                self._add(
                    now,
                    "ready",
                    "info" if system.ready else "bad",
                    "ready" if system.ready else "not ready any more",
                )
        self._known = system
        retries = int(grown.get("redispatches", 0))
        self._count(now, "retry", retries, system.last_retries[-1] if retries and system.last_retries else "")
        self._count(now, "recovery", int(grown.get("recoveries", 0)))
        self._count(
            now, "borrowed", int(grown.get("borrowed_prompts", 0) + grown.get("borrowed_sequences", 0))
        )
        self._count(now, "preempted", int(grown.get("preemptions", 0)))
        self._count(now, "refused", refusals.get("429", 0))
        self._count(now, "failed", sum(count for status, count in refusals.items() if status >= "500"))

    def newest(self) -> list[dict[str, Any]]:
        """JSON-ready, oldest first."""
        return list(self._events)

    def lost_since(self, moment: float) -> list[str]:
        """Workers that were lost since then, each with the reason."""
        return [words for at, words in self._lost if at >= moment]

    def _membership(self, now: float, before: SystemSnapshot, system: SystemSnapshot) -> None:
        old, new = (
            {(w.worker_id, w.pid): w for w in before.workers},
            {(w.worker_id, w.pid): w for w in system.workers},
        )
        gone = [w for process, w in old.items() if process not in new]
        if left := [w for w in gone if system.reasons_lost.get(w.worker_id) == DRAINED]:
            self._add(now, "worker", "info", f"{_names(left)} drained and left")
        for reason in dict.fromkeys(system.reasons_lost.get(w.worker_id, "") for w in gone):
            lost = [w for w in gone if system.reasons_lost.get(w.worker_id, "") == reason]
            if reason == DRAINED:
                continue
            self.totals["lost"] += len(lost)
            words = f"{_names(lost)} lost" + (f": {reason}" if reason else "")
            self._lost.extend((now, f"{w.worker_id} ({reason})" if reason else w.worker_id) for w in lost)
            self._add(now, "lost", "bad", words)
        if joined := [w for process, w in new.items() if process not in old]:
            self._add(now, "worker", "info", f"{_names(joined)} joined")

    def _count(self, now: float, kind: str, count: int, detail: str = "") -> None:
        if count <= 0:
            return
        self.totals[kind] += count
        level, one, many = COUNTED[kind]
        last = self._last.get(kind, {})
        if last in self._events and self._wall + now - last["t"] <= JOIN_S + last["for_s"]:
            self._events.remove(last)  # to the end
            self._events.append(last)
            last.update(
                count=last["count"] + count,
                for_s=round(self._wall + now - last["t"], 1),
                detail=detail or last["detail"],
            )
            last["text"] = f"{last['count']:,} {many}"
        else:
            self._last[kind] = self._add(
                now, kind, level, f"{count:,} {one if count == 1 else many}", count, detail
            )

    def _add(
        self, now: float, kind: str, level: Level, text: str, count: int = 1, detail: str = ""
    ) -> dict[str, Any]:
        """An event goes on for ``for_s`` from ``t`` on, which is in seconds since 1970."""
        event = {
            "t": round(self._wall + now, 1),
            "for_s": 0.0,
            "kind": kind,
            "level": level,
            "text": text,
            "count": count,
            "detail": detail,
        }
        self._events.append(event)
        return event


def _names(workers: Sequence[WorkerSnapshot]) -> str:
    if len(workers) <= MAX_NAMED:
        return ", ".join(w.worker_id for w in workers)
    roles = sorted({w.role for w in workers})
    return " and ".join(f"{sum(w.role == role for w in workers)} {role} workers" for role in roles)
