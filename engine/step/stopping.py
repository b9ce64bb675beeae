"""When a sequence is over."""

from __future__ import annotations

from typing import Literal

from .batch import SamplingState


def last_output_index(state: SamplingState, max_model_len: int) -> int:
    """The output index of the last token that this sequence may have: by ``max_tokens`` or by the model's
    context."""
    return min(state.params.max_tokens, max_model_len - len(state.prompt_token_ids)) - 1


def stop_set(state: SamplingState, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end this sequence."""
    stops = frozenset(state.params.stop_token_ids)
    return stops if state.params.ignore_eos else stops | eos_token_ids


def finish_reason(
    token: int, index: int, stops: frozenset[int], min_tokens: int, last_index: int
) -> Literal["stop", "length"] | None:
    """Whether output token ``token`` at output index ``index`` ends its sequence. The end token itself is
    reported too."""
    if token in stops and index + 1 > min_tokens:
        return "stop"
    return "length" if index >= last_index else None
