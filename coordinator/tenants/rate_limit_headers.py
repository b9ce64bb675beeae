"""What a client is told of its limits: ``x-ratelimit-*`` headers and refusals, as OpenAI's API words them."""

from __future__ import annotations

import math

from ..http.call import Headers
from ..http.errors import ApiError, RateLimited
from .buckets import Room, Shortage
from .limiter import ASSUMED_OUTPUT_TOKENS

WORDS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "streams": "requests open at the same time",
    "day": "tokens per day",
    "month": "tokens per month",
}


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
            f"Request too large: it is taken for {shortage.asked} tokens (its prompt and up to {ASSUMED_OUTPUT_TOKENS} of each answer), "
            f"and the limit is {limit} {what}. Shorten the prompt or ask for fewer tokens."
        )
        return RateLimited(message, "rate_limit_exceeded", shortage.what, headers_of(shortage.room), None)
    code = "insufficient_quota" if shortage.what in ("day", "month") else "rate_limit_exceeded"
    message = f"Rate limit reached: {limit} {what}, and this request needs {shortage.asked}. Try again in {duration(shortage.wait_s)}."
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
