"""What one request used: what is metered, stored and billed."""

from __future__ import annotations

from typing import NamedTuple

LOST = "lost"
"""Status of a request that was running when its coordinator was killed: what it had been given beyond its
prompt is not known."""


class UsageRecord(NamedTuple):
    """Seconds, tokens, and bytes of KV cache times the seconds they were held. ``started``: unix seconds."""

    id: str
    started: float
    tenant: str
    key: str
    model: str
    endpoint: str
    priority_class: str
    status: str
    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    kv_byte_seconds: float = 0.0
    parse_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    decode_s: float = 0.0
    stream_s: float = 0.0


FIELDS = UsageRecord._fields
SUMS = (
    "prompt_tokens", "cached_tokens", "completion_tokens", "kv_byte_seconds", "queue_s", "prefill_s",
    "handoff_s", "decode_s",
)  # fmt: skip
