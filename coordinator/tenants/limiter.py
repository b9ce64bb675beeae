"""Who holds to the limits: nobody where none are configured, all processes of this host together, or all
hosts together (Redis)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ..background import Spawn, unwatched
from ..errors import ApiError, Headers, RateLimited
from .buckets import Room, Shortage
from .limits import Account

ASSUMED_OUTPUT_TOKENS = 512
"""Of an answer that may be longer: what it is taken for until it has ended."""

WORDS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "streams": "requests open at the same time",
    "day": "tokens per day",
    "month": "tokens per month",
}


class Admission(NamedTuple):
    """What was taken for a request, until ``settle``."""

    account: Account
    tokens: int
    room: Room


Answer = Callable[[Admission | Shortage], None]


class Limiter(Protocol):
    """Called on the event loop; never blocks it for long."""

    def admit(self, account: Account, tokens: int, answer: Answer) -> None:
        """Asks for room for one request of about so many tokens. ``answer`` is called once: at once, or from
        the loop."""

    def correct(self, admission: Admission, tokens: int, answer: Answer) -> None:
        """The request needs so many tokens, as shows now. With a Shortage all is given back but that it was
        asked."""

    def settle(self, admission: Admission, tokens: int) -> None:
        """It has ended, and used so many."""

    async def start(self, spawn: Spawn = unwatched) -> None:
        """Call it before the first request; ``spawn`` starts its background work."""

    async def stop(self) -> None:
        """After the last one."""


class NoLimits:
    """A ``Limiter`` that lets everything in."""

    def admit(self, account: Account, tokens: int, answer: Answer) -> None:
        answer(Admission(account, tokens, Room()))

    def correct(self, admission: Admission, tokens: int, answer: Answer) -> None:
        answer(Admission(admission.account, tokens, admission.room))

    def settle(self, admission: Admission, tokens: int) -> None: ...

    async def start(self, spawn: Spawn = unwatched) -> None: ...

    async def stop(self) -> None: ...


def estimated_tokens(num_prompt_tokens: int, max_tokens: int, num_choices: int) -> int:
    """What a request is taken to use: its prompts once, and each choice's answer."""
    return num_prompt_tokens + num_choices * min(max_tokens, ASSUMED_OUTPUT_TOKENS)


def headers_of(room: Room) -> Headers:
    """None of what has no limit."""
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
    """429, with what was asked, what is allowed and when to come again."""
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
    """As OpenAI writes it: 6m0s, 1.5s, 20ms."""
    milliseconds = math.ceil(max(0.0, seconds) * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    rest = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{hours}h{minutes}m{rest}" if hours else f"{minutes}m{rest}" if minutes else rest
