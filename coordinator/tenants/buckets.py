"""How much of its limits a key or a tenant has left: two token buckets and two quotas over seven numbers.
Pure.

The numbers lie in memory that processes share, or in Redis (``redis_limiter.py`` has the same rules in Lua,
and a test holds the two to each other). A bucket holds a minute's worth and fills evenly: a burst of a
minute's worth passes, and the mean rate is kept. Tokens are taken by estimate when a request comes in and set
right when it ends; a bucket in debt lets nobody in until it is paid. Times are unix seconds, so that hosts
agree; days and months are UTC's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from .limits import Limits

REQUESTS, TOKENS, FILLED_AT, DAY, DAY_TOKENS, MONTH, MONTH_TOKENS = range(7)
NUM_FIELDS = 7
FULL = 1e300  # of a bucket without a limit: it is full should it get one
DAY_S = 86_400
SET_BACK_S = 60.0
"""More than that the clocks of two looks differ only where one was set back."""
STREAM_WAIT_S = 1.0  # nobody knows when a stream ends
What = Literal["requests", "tokens", "streams", "day", "month"]


class Holder(NamedTuple):
    """A key or a tenant, its limits and what it holds. ``num_streams``: requests of it that are open."""

    state: list[float]
    limits: Limits
    num_streams: int = 0


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a request is not let in. ``wait_s``: until it could be; infinite where it is larger than the limit
    itself."""

    what: What
    limit: int
    asked: int
    wait_s: float
    room: Room


class Room(NamedTuple):
    """The remaining room, of the holder that has less; None: no limit. Resets: seconds until it is full."""

    limit_requests: int | None = None
    remaining_requests: int = 0
    reset_requests_s: float = 0.0
    limit_tokens: int | None = None
    remaining_tokens: int = 0
    reset_tokens_s: float = 0.0


def admit(holders: Sequence[Holder], tokens: int, now: float) -> Shortage | Room:
    """Take one request and ``tokens`` from each holder, or nothing from any."""
    for holder in holders:
        fill(holder, now)
    if (shortage := shortage_of(holders, tokens, now)) is not None:
        return shortage
    for state, limits, _ in holders:
        if limits.requests_per_minute is not None:
            state[REQUESTS] -= 1
        take(state, limits, tokens)
    return room(holders)


def correct(holders: Sequence[Holder], estimated: int, tokens: int, now: float) -> Shortage | Room:
    """Takes the tokens that a request needs in place of those it was taken for; with too few, gives all of
    them back."""
    settle(holders, estimated, 0, now)
    admitted = [Holder(state, tokens_alone(limits)) for state, limits, _ in holders]
    if (shortage := shortage_of(admitted, tokens, now)) is not None:
        return replace(shortage, room=room(holders))
    for state, limits, _ in holders:
        take(state, limits, tokens)
    return room(holders)


def tokens_alone(limits: Limits) -> Limits:
    """Return the limits on tokens only: requests and streams were counted before."""
    return limits.model_copy(update={"requests_per_minute": None, "max_streams": None})


def shortage_of(holders: Sequence[Holder], tokens: int, now: float) -> Shortage | None:
    """Return the longest shortage for one request of ``tokens``; the buckets are filled up to ``now``."""
    full = [holder for holder in holders if not _has_room(holder, tokens)]
    if not full:
        return None  # mostly, and every request asks
    short = [found for holder in full for found in _shortages(holder, tokens, now)]
    what, limit, asked, wait_s = max(short, key=lambda s: s[3])
    return Shortage(what, limit, asked, wait_s, room(holders))


def settle(holders: Sequence[Holder], estimated: int, used: int, now: float) -> None:
    """Replace the estimate by the ``used`` tokens of a request that has ended."""
    for holder in holders:
        fill(holder, now)
        take(holder.state, holder.limits, used - estimated)


def take(state: list[float], limits: Limits, tokens: int) -> None:
    """Negative: gives back."""
    if (per_minute := limits.tokens_per_minute) is not None:
        level = state[TOKENS] - tokens
        state[TOKENS] = level if level < per_minute else per_minute
    used = state[DAY_TOKENS] + tokens
    state[DAY_TOKENS] = used if used > 0 else 0.0
    used = state[MONTH_TOKENS] + tokens
    state[MONTH_TOKENS] = used if used > 0 else 0.0


def fill(holder: Holder, now: float) -> None:
    """Brings a holder's buckets and calendar up to ``now``. A clock that went back fills nothing; one
    that was wrong and is set right does not stop them until its wrong time comes again."""
    state, limits, _ = holder
    filled_at = state[FILLED_AT]
    if now < filled_at - SET_BACK_S:
        filled_at = state[FILLED_AT] = now
        state[DAY], state[MONTH] = min(state[DAY], now // DAY_S), min(state[MONTH], month_of(now))
    minutes = math.inf if filled_at == 0 else (now - filled_at) / 60  # a new one is full
    if minutes > 0:
        state[FILLED_AT] = now
    else:
        minutes = 0.0
    for bucket, per_minute in ((REQUESTS, limits.requests_per_minute), (TOKENS, limits.tokens_per_minute)):
        if per_minute is None:
            state[bucket] = FULL
        else:
            level = state[bucket] + minutes * per_minute
            state[bucket] = level if level < per_minute else per_minute
    day = now // DAY_S
    if day > state[DAY]:
        state[DAY], state[DAY_TOKENS] = day, 0.0
        month = month_of(now)
        if month > state[MONTH]:
            state[MONTH], state[MONTH_TOKENS] = month, 0.0


def room(holders: Sequence[Holder]) -> Room:
    """For the headers."""
    requests = tokens = (FULL, 1)
    for state, limits, _ in holders:
        if limits.requests_per_minute is not None and state[REQUESTS] < requests[0]:
            requests = (state[REQUESTS], limits.requests_per_minute)
        if limits.tokens_per_minute is not None and state[TOKENS] < tokens[0]:
            tokens = (state[TOKENS], limits.tokens_per_minute)
    return Room(*_left(*requests), *_left(*tokens))


def month_of(now: float) -> int:
    """Months since year 0."""
    date = datetime.fromtimestamp(now, UTC)
    return date.year * 12 + date.month - 1


def month_end(now: float) -> float:
    """When the calendar month ends, in unix seconds."""
    year, month = divmod(month_of(now) + 1, 12)
    return datetime(year, month + 1, 1, tzinfo=UTC).timestamp()


def _left(level: float, limit: int) -> tuple[int | None, int, float]:
    if level == FULL:
        return None, 0, 0.0
    return limit, math.floor(level) if level > 0 else 0, (limit - level) * 60 / limit


def _has_room(holder: Holder, tokens: int) -> bool:
    """Whether one request of ``tokens`` fits; ``_shortages`` lists the limits that it exceeds."""
    state, limits, num_streams = holder
    return (
        (limits.requests_per_minute is None or state[REQUESTS] >= 1)
        and ((limit := limits.tokens_per_minute) is None or state[TOKENS] >= tokens)
        and ((limit := limits.max_streams) is None or num_streams < limit)
        and ((limit := limits.tokens_per_day) is None or state[DAY_TOKENS] + tokens <= limit)
        and ((limit := limits.tokens_per_month) is None or state[MONTH_TOKENS] + tokens <= limit)
    )


def _shortages(holder: Holder, tokens: int, now: float) -> list[tuple[What, int, int, float]]:
    state, limits, num_streams = holder
    found: list[tuple[What, int, int, float]] = []
    if (limit := limits.requests_per_minute) is not None and state[REQUESTS] < 1:
        found.append(("requests", limit, 1, (1 - state[REQUESTS]) * 60 / limit))
    if (limit := limits.tokens_per_minute) is not None and state[TOKENS] < tokens:
        found.append(
            ("tokens", limit, tokens, (tokens - state[TOKENS]) * 60 / limit if tokens <= limit else math.inf)
        )
    if (limit := limits.max_streams) is not None and num_streams >= limit:
        found.append(("streams", limit, 1, STREAM_WAIT_S))
    if (limit := limits.tokens_per_day) is not None and state[DAY_TOKENS] + tokens > limit:
        found.append(("day", limit, tokens, (now // DAY_S + 1) * DAY_S - now))
    if (limit := limits.tokens_per_month) is not None and state[MONTH_TOKENS] + tokens > limit:
        found.append(("month", limit, tokens, month_end(now) - now))
    return found
