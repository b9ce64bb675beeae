"""The findings of the diagnosis, and their wording. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..metrics.load_window import Window
from .queueing import SATURATED, ttft_with_one_more

MIN_REQUESTS = 20
"""Requests in the window below which their times are not judged."""
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


class Finding(NamedTuple):
    """``level``: good, idle, unknown (too little data), warn (requests are slow), bad (requests fail)."""

    kind: str
    level: Literal["good", "idle", "unknown", "warn", "bad"]
    what: str
    remedy: str = ""
    basis: str = ""  # method of the expected gain
    share: float = 0.0  # of requests' time, for the order


def too_few(w: Window) -> Finding:
    open_now = (
        f" {requests(w.now_waiting)} waiting, {w.now_running:,} running."
        if w.now_waiting or w.now_running
        else ""
    )
    if not w.num_ended and not open_now:
        return Finding("idle", "idle", "Idle: no request in the last minute.")
    what = (
        f"Too few requests to tell: {w.num_measured} answered in the last minute, {MIN_REQUESTS} are "
        f"needed.{open_now}"
    )
    return Finding("too_few", "unknown", what)


def all_good(w: Window) -> Finding:
    stage = max(w.stages, key=lambda name: w.stages[name])
    kept = "" if w.kept is None else f"; {percent(w.kept)} of requests keep the objectives"
    text = (
        f"Nothing is in the way. {percent(w.share(stage))} of requests' time is {stage}, "
        f"{percent(w.share('queue'))} queueing{kept}."
    )
    return Finding("good", "good", text)


def one_more(w: Window, role: str, busy: float) -> str:
    """What another worker of this role is expected to do, without the full stop."""
    workers = int(w.pools[role].num_workers)
    ttft_s = ttft_with_one_more(
        w.ttft_s, w.stages.get("queue", 0.0), w.total_s, w.num_measured / w.seconds, busy, workers
    )
    gain = 1 - ttft_s / w.ttft_s if w.ttft_s else 0.0
    which = f"{nth(workers + 1)} {role} worker would"
    if gain < 0.05:
        return f"{which} hardly change the time to first token"
    does = "halve" if 0.45 <= gain <= 0.55 else "cut"
    much = "" if does == "halve" else f" by {percent(gain)}"
    return (
        f"{which} {does} the time to first token{much}, from {duration(w.ttft_s)} to about {duration(ttft_s)}"
    )


def basis_of_queue(busy: float) -> str:
    if busy < SATURATED:
        return "an open queue, by Sakasegawa's formula"
    return "a closed system, by mean value analysis; more where arrivals do not wait"


def requests(count: int) -> str:
    return f"{count:,} request{'' if count == 1 else 's'}"


def nth(number: int) -> str:
    return f"A{'n' * (number == 8)} {ORDINALS[number - 1]}" if number <= len(ORDINALS) else "One more"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def duration(seconds: float) -> str:
    """Return a duration with two digits, the model's precision."""
    return f"{float(f'{seconds:.2g}'):g} s" if seconds >= 1 else f"{float(f'{1e3 * seconds:.2g}'):g} ms"
