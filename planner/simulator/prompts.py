"""A trace's requests as the coordinator takes them: equal block hashes become equal tokens, all else is
unique."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ...coordinator.lifecycle.request import Ended, Request
from ...transport.messages.messages import Sampling, TokenLogprobs
from ..trace.request import TraceRequest

WORD = (1 << 32) - 1


class NullSink:
    """The lifecycle calls no sink: its shell does, and this one's has no client."""

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Not called."""

    def push_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Not called."""

    def flush(self) -> None:
        """Not called."""

    def end(self, ended: Ended) -> None:
        """Not called."""


SINK = NullSink()


def generation_request(
    number: int, request: TraceRequest, block_size: int, arrival: float, timeout_s: float
) -> Request:
    """``block_size``: tokens that one of the trace's hashes stands for; ``arrival``: seconds of the virtual
    clock."""
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=prompt_tokens(number, request, block_size),
        sampling=_sampling(request.num_output_tokens),
        sink=SINK,
        arrival=arrival,
        deadline=arrival + timeout_s,
        session=request.session,
    )


def prompt_tokens(number: int, request: TraceRequest, block_size: int) -> list[int]:
    """Each hashed block begins with its hash; what is not hashed begins with the request's number."""
    tokens: list[int] = []
    for block_hash in request.block_hashes:
        words = [block_hash >> shift & WORD for shift in (0, 32, 64, 96)]
        tokens += (words + [0] * (block_size - 4))[:block_size]
    num_own = request.num_prompt_tokens - len(tokens)
    if num_own <= 0:
        return tokens[: request.num_prompt_tokens]
    own = [number & WORD, *([0] * (num_own - 1))]
    return tokens + own


@lru_cache(maxsize=4096)
def _sampling(num_output_tokens: int) -> Sampling:
    return Sampling(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
