"""A request's sampling fields, with the model's defaults, as the workers take them."""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Any

from msgspec import convert
from msgspec.structs import replace

from ...transport.messages.messages import Sampling
from ..errors import ContextTooLong, InvalidRequest
from ..text.served_model import ServedModel
from .bodies.chat import ChatCompletionRequest
from .bodies.completion import CompletionRequest

COMPLETION_MAX_TOKENS = 16
SMALLEST_TOP_P = 1e-6
"""Stands for 0: only the most likely token is left."""
FROM_REQUEST = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "min_tokens", "stop_token_ids", "ignore_eos"),
    }
)
"""Taken over as they are, where they are given."""
NUM_USUAL = 8
"""Fields that every request's sampling has."""

GenerateRequest = CompletionRequest | ChatCompletionRequest


def sampling_of(request: GenerateRequest, model: ServedModel, num_prompt_tokens: int, grammar: bytes = b"") -> Sampling:
    """That of a prompt's first choice. Raises InvalidRequest where the request does not fit the model."""
    max_tokens = _max_tokens(request, model, num_prompt_tokens)
    defaults = model.defaults
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "seed": seed_of(request.seed, 0),
        "temperature": float(defaults.temperature),
        "top_k": int(defaults.top_k),
        "top_p": float(defaults.top_p),
        "min_p": float(defaults.min_p),
        "repetition_penalty": float(defaults.repetition_penalty),
        "grammar": grammar,
    }
    for name in request.model_fields_set & FROM_REQUEST:
        if (given := getattr(request, name)) is not None:
            fields[name] = given
    if len(fields) > NUM_USUAL:
        _check(fields, model.vocab_size)
    fields["top_k"] = max(0, fields["top_k"])
    fields["top_p"] = max(fields["top_p"], SMALLEST_TOP_P)
    logprobs = num_logprobs(request)
    if logprobs is not None or is_ranked(request):
        fields["logprobs"] = logprobs or 0
    return convert(fields, Sampling)


def num_logprobs(request: GenerateRequest) -> int | None:
    """How many alternatives to report beside each token; None: no log probabilities at all."""
    if isinstance(request, ChatCompletionRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs


def is_ranked(request: GenerateRequest) -> bool:
    """More is generated than given back: the best is."""
    return request.num_candidates > (request.n or 1)


def for_choice(first: Sampling, seed: int | None, choice: int) -> Sampling:
    """That of another choice of the same prompt; only the seed differs."""
    return first if choice == 0 else replace(first, seed=seed_of(seed, choice))


def seed_of(seed: int | None, choice: int) -> int:
    """A choice's seed: from the client's and the choice's number; drawn where the client gave none."""
    if seed is None:
        return random.getrandbits(63)
    if choice == 0:
        return seed % (1 << 63)
    return int.from_bytes(blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()) >> 1


def _max_tokens(request: GenerateRequest, model: ServedModel, num_prompt_tokens: int) -> int:
    chat = isinstance(request, ChatCompletionRequest)
    asked = request.max_new_tokens
    new_name = isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None
    param = "max_completion_tokens" if new_name else "max_tokens"
    room = model.max_model_len - num_prompt_tokens
    if asked is not None:
        if asked > room:
            raise ContextTooLong(model.max_model_len, num_prompt_tokens, asked, param=param)
        return asked
    if room < 1:
        raise ContextTooLong(model.max_model_len, num_prompt_tokens, None, param="messages" if chat else "prompt")
    default = model.defaults.max_new_tokens or (room if chat else COMPLETION_MAX_TOKENS)
    return min(room, default)


def _check(fields: dict[str, Any], vocab_size: int) -> None:
    """What the request gave that is seldom given."""
    for name in ("logit_bias", "stop_token_ids"):
        bad = [token_id for token_id in fields.get(name, ()) if token_id >= vocab_size]
        if bad:
            message = f"{name}: token ids {', '.join(map(str, bad))} are outside the vocabulary of {vocab_size} tokens"
            raise InvalidRequest(message, param=name)
    if (min_tokens := fields.get("min_tokens", 0)) > (max_tokens := fields["max_tokens"]):
        raise InvalidRequest(f"min_tokens: is {min_tokens}, more than the {max_tokens} tokens allowed at most", param="min_tokens")
