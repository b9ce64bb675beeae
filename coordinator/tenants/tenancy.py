"""Access of requests for tokens: the account of a key, the limits that it is held to, and its metering.

By default there are no keys, no limits and no metering. ``opening.py`` opens what the settings name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..background import Spawn, unwatched
from ..errors import ApiError, Headers, RateLimited
from .buckets import Room, Shortage
from .limits import ANONYMOUS, Account
from .meter import Meter

ASSUMED_OUTPUT_TOKENS = 512
"""Estimate of an answer that may be longer, until it has ended."""
WORDS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "streams": "requests open at the same time",
    "day": "tokens per day",
    "month": "tokens per month",
}


class Admission(NamedTuple):
    """A request's share of the limits, until ``settle``."""

    account: Account
    tokens: int
    room: Room


Answer = Callable[[Admission | Shortage], None]


class Directory(Protocol):
    """Finds the accounts of API keys."""

    def account(self, authorization: bytes) -> Account:
        """Return the account for an ``Authorization`` header, empty if there is none. Raises Unauthorized."""

    def account_of_key(self, key_id: int) -> Account | None:
        """Return a key's present account, for work without a client; None if the key has ended.

        0 stands for no key, where none is required.
        """


class Everyone:
    """A ``Directory`` without keys: all requests are of one tenant without a name or a limit."""

    def account(self, authorization: bytes) -> Account:
        return ANONYMOUS

    def account_of_key(self, key_id: int) -> Account | None:
        return ANONYMOUS if key_id == 0 else None


class Limiter(Protocol):
    """Called on the event loop; never blocks it for long."""

    def admit(self, account: Account, tokens: int, answer: Answer) -> None:
        """Ask for one request of about ``tokens``. ``answer`` is called once: now, or from the loop."""

    def correct(self, admission: Admission, tokens: int, answer: Answer) -> None:
        """Replace the estimate by ``tokens``. A Shortage returns all but the count of requests."""

    def settle(self, admission: Admission, tokens: int) -> None:
        """End a request that used ``tokens``."""

    async def start(self, spawn: Spawn = unwatched) -> None:
        """Begin, before the first request; ``spawn`` starts background work."""

    async def stop(self) -> None:
        """End, after the last request."""


class NoLimits:
    """A ``Limiter`` that admits everything."""

    def admit(self, account: Account, tokens: int, answer: Answer) -> None:
        answer(Admission(account, tokens, Room()))

    def correct(self, admission: Admission, tokens: int, answer: Answer) -> None:
        answer(Admission(admission.account, tokens, admission.room))

    def settle(self, admission: Admission, tokens: int) -> None: ...

    async def start(self, spawn: Spawn = unwatched) -> None: ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Tenancy:
    """The three parts: accounts by key, limits, metering."""

    directory: Directory = field(default_factory=Everyone)
    limiter: Limiter = field(default_factory=NoLimits)
    meter: Meter | None = None


def estimated_tokens(num_prompt_tokens: int, max_tokens: int, num_choices: int) -> int:
    """Return the estimate for a request: its prompts once, and each choice's answer."""
    return num_prompt_tokens + num_choices * min(max_tokens, ASSUMED_OUTPUT_TOKENS)


def headers_of(room: Room) -> Headers:
    """Return the rate limit headers; none without a limit."""
    headers: Headers = []
    if room.limit_requests is not None:
        headers += _of(b"requests", room.limit_requests, room.remaining_requests, room.reset_requests_s)
    if room.limit_tokens is not None:
        headers += _of(b"tokens", room.limit_tokens, room.remaining_tokens, room.reset_tokens_s)
    return headers


def _of(name: bytes, limit: int, remaining: int, reset_s: float) -> Headers:
    return [
        (b"x-ratelimit-limit-" + name, b"%d" % limit),
        (b"x-ratelimit-remaining-" + name, b"%d" % remaining),
        (b"x-ratelimit-reset-" + name, duration(reset_s).encode()),
    ]


def refusal_of(shortage: Shortage) -> ApiError:
    """Return the 429, with the request's need, the limit, and the time to try again."""
    what, limit = WORDS[shortage.what], shortage.limit
    if math.isinf(shortage.wait_s):
        message = (
            f"Request too large: it is taken for {shortage.asked} tokens (its prompt and up to "
            f"{ASSUMED_OUTPUT_TOKENS} of each answer), "
            f"and the limit is {limit} {what}. Shorten the prompt or ask for fewer tokens."
        )
        return RateLimited(message, "rate_limit_exceeded", shortage.what, headers_of(shortage.room), None)
    code = "insufficient_quota" if shortage.what in ("day", "month") else "rate_limit_exceeded"
    message = (
        f"Rate limit reached: {limit} {what}, and this request needs {shortage.asked}. Try again in "
        f"{duration(shortage.wait_s)}."
    )
    return RateLimited(message, code, shortage.what, headers_of(shortage.room), shortage.wait_s)


def duration(seconds: float) -> str:
    """Return a duration in OpenAI's notation: 6m0s, 1.5s, 20ms."""
    milliseconds = math.ceil(max(0.0, seconds) * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    rest = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{hours}h{minutes}m{rest}" if hours else f"{minutes}m{rest}" if minutes else rest
