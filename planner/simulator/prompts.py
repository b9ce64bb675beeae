"""A trace's requests as the coordinator takes them: equal block hashes become equal tokens, all else is
unique."""

from __future__ import annotations

from functools import lru_cache

from ...coordinator.dispatcher import ClosedSink
from ...coordinator.lifecycle.request import Request
from ...traces.request import TraceRequest
from ...transport.messages.messages import SamplingParams

WORD = (1 << 32) - 1
NO_SINK = ClosedSink()


def generation_request(
    number: int, request: TraceRequest, block_size: int, arrival: float, timeout_s: float, longest: int
) -> Request:
    """``block_size``: tokens that one of the trace's hashes stands for; ``arrival``: seconds of the virtual
    clock; ``longest``: tokens at which an answer ends early."""
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=prompt_tokens(number, request, block_size),
        sampling=sampling(max(1, min(request.num_output_tokens, longest - request.num_prompt_tokens))),
        sink=NO_SINK,
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
def sampling(num_output_tokens: int) -> SamplingParams:
    """Return the parameters of an answer of this length."""
    return SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
