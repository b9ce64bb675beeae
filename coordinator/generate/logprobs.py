"""Log probabilities as both endpoints report them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...transport.messages.messages import TokenLogprobs
from ..text.token_table import TokenTable

SMALLEST_LOGPROB = -9999.0


class TokenEntry(NamedTuple):
    """One token. ``offset``: characters before it; ``logprobs``: None for a prompt's first token."""

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int


def completion_logprobs(entries: Sequence[TokenEntry], table: TokenTable, as_ids: bool) -> dict[str, Any]:
    """Return /v1/completions' form: four lists of equal length."""
    return {
        "tokens": [_name(entry.token_id, table, as_ids) for entry in entries],
        "token_logprobs": [
            None if entry.logprobs is None else _finite(entry.logprobs.logprob) for entry in entries
        ],
        "top_logprobs": [
            None if entry.logprobs is None else _top(entry.token_id, entry.logprobs, table, as_ids)
            for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(entries: Sequence[TokenEntry], table: TokenTable, as_ids: bool) -> dict[str, Any]:
    """Return /v1/chat/completions' form: a list of tokens, each with its bytes and its alternatives."""
    content = []
    for entry in entries:
        assert entry.logprobs is not None
        alternatives = zip(entry.logprobs.top_ids, entry.logprobs.top_logprobs, strict=True)
        top = [_chat_token(token_id, logprob, table, as_ids) for token_id, logprob in alternatives]
        own = _chat_token(entry.token_id, entry.logprobs.logprob, table, as_ids)
        content.append({**own, "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprob(token_id: int, logprobs: TokenLogprobs, table: TokenTable) -> dict[str, Any]:
    """Return vLLM's form of one token of a prompt: by id, itself and its alternatives. A rank is known
    only of the alternatives."""
    ranked = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    found = {id: (logprob, rank) for rank, (id, logprob) in enumerate(ranked, 1)}
    own = {token_id: found.get(token_id, (logprobs.logprob, None))}
    return {
        str(id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": _text(id, table)}
        for id, (logprob, rank) in {**own, **found}.items()
    }


def first(logprobs: TokenLogprobs, most: int) -> TokenLogprobs:
    """Return it with at most ``most`` alternatives."""
    if len(logprobs.top_ids) <= most:
        return logprobs
    return TokenLogprobs(logprobs.logprob, logprobs.top_ids[:most], logprobs.top_logprobs[:most])


def _name(token_id: int, table: TokenTable, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else _text(token_id, table)


def _chat_token(token_id: int, logprob: float, table: TokenTable, as_ids: bool) -> dict[str, Any]:
    return {
        "token": _name(token_id, table, as_ids),
        "logprob": _finite(logprob),
        "bytes": list(table.token_bytes(token_id)),
    }


def _top(token_id: int, logprobs: TokenLogprobs, table: TokenTable, as_ids: bool) -> dict[str, float]:
    """Return the alternatives and the token itself. Of two ids with one text the likelier one stays."""
    top: dict[str, float] = {}
    for other_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
        top.setdefault(_name(other_id, table, as_ids), _finite(logprob))
    top.setdefault(_name(token_id, table, as_ids), _finite(logprobs.logprob))
    return top


def _text(token_id: int, table: TokenTable) -> str:
    return table.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, SMALLEST_LOGPROB) if not math.isnan(logprob) else SMALLEST_LOGPROB
