"""What several messages carry: a request, how to sample its tokens, who a worker is."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from .fields import (
    MAX_REQUEST_TOKENS,
    Address,
    Count,
    Dispatch,
    Duration,
    Grammar,
    Incarnation,
    Message,
    Name,
    TokenColumn,
)

FinishReason = Literal["stop", "length"]
Role = Literal["prefill", "decode"]


class Sampling(Message, frozen=True, kw_only=True):
    """How to choose tokens. ``seed`` is always set: the coordinator draws one where the client gave none.

    Noise is a function of (seed, absolute position) only. ``logprobs`` is the number of alternatives to
    report beside the chosen token's own logprob; None reports nothing.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)] = 0
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0  # 0: off
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    logit_bias: Annotated[dict[int, float], Meta(max_length=1024)] = field(default_factory=dict)
    seed: Count = 0
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=64)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    grammar: Grammar = b""  # which the output is to follow


class TokenLogprobs(Message, frozen=True, kw_only=True):
    """Natural-log probabilities at one position: the chosen token's, and the most likely ones in order."""

    logprob: float
    top_ids: Annotated[tuple[int, ...], Meta(max_length=20)] = ()
    top_logprobs: Annotated[tuple[float, ...], Meta(max_length=20)] = ()


class RequestSpec(Message, frozen=True, kw_only=True):
    """All a worker needs to know of one attempt at a request.

    ``token_ids`` is the prompt followed by the tokens that the client already has; the first
    ``num_prompt_tokens`` of them are the prompt, the rest are output (they count for penalties, for
    ``max_tokens`` and for ``min_tokens``). The next token's output index is ``num_tokens -
    num_prompt_tokens``.
    """

    request_id: Name
    epoch: Count
    dispatch: Dispatch
    coordinator: Incarnation
    token_ids: TokenColumn
    num_prompt_tokens: Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]
    sampling: Sampling
    salt: Annotated[bytes, Meta(max_length=64)] = b""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    deadline_s: Duration  # seconds left until the request as a whole must have ended
    traceparent: Annotated[str, Meta(max_length=64)] = ""  # of the request's span; empty: it leaves no trace

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    def check(self) -> None:
        """See ``Message``."""
        if self.num_prompt_tokens > self.num_tokens:
            raise ValueError(f"{self.num_prompt_tokens} prompt tokens in {self.num_tokens} tokens")


class ModelIdentity(Message, frozen=True, kw_only=True):
    """What two workers must share before KV blocks may pass between them. Compared field by field."""

    fingerprint: Name  # of weights, config and tokenizer
    dtype: Name  # of the KV cache
    block_size: Annotated[int, Meta(ge=1, le=4096)]
    layout: Name  # e.g. "block-major/v1 [num_layers=12, 2, block_size=16, num_kv_heads=4, head_dim=64]"
    block_bytes: Annotated[int, Meta(ge=1, le=1 << 32)]
    numerics: Name = "fast"  # or which exact kernels: bits agree only among the same
    window: Count = 0  # tokens that a token attends to at most, in any layer; 0: no bound


class Peer(Message, frozen=True, kw_only=True):
    """A decode worker as a prefill worker reaches it."""

    worker_id: Name
    incarnation: Incarnation
    address: Address
