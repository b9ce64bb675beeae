"""``SamplingParams`` of a request: its fields over the model's defaults."""

from __future__ import annotations

import random
from hashlib import blake2b
from typing import Any

from msgspec import convert

from ...transport.messages.messages import SamplingParams
from ..errors import ContextTooLong, WrongField
from ..text.served_model import ServedModel
from .bodies.chat import ChatCompletionRequest
from .prompts import GenerateRequest

COMPLETION_MAX_TOKENS = 16
SMALLEST_TOP_P = 1e-6  # stands for 0: only the most likely token is left
SMALLEST_TEMPERATURE = 1e-5  # less stands for 0, as in vLLM: logits divided by 1e-40 are infinite
FROM_REQUEST = {
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "min_tokens", "stop_token_ids", "ignore_eos", "logprob_token_ids",
}  # fmt: skip
"""Sampling fields that are taken over as given."""
NUM_USUAL = 8  # fields that every request's sampling has


def sampling_of(
    request: GenerateRequest, model: ServedModel, num_prompt_tokens: int, grammar: bytes = b""
) -> SamplingParams:
    """Return the sampling of a prompt's first candidate: the request's fields over the model's defaults."""
    defaults = model.defaults
    fields: dict[str, Any] = {
        "max_tokens": _max_tokens(request, model, num_prompt_tokens),
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
        _check_unusual(fields, model.vocab_size)
    fields["top_k"] = max(0, fields["top_k"])
    fields["top_p"] = max(fields["top_p"], SMALLEST_TOP_P)
    if fields["temperature"] < SMALLEST_TEMPERATURE:
        fields["temperature"] = 0.0
    logprobs = request.num_logprobs
    if logprobs is not None or request.num_candidates > (request.n or 1):  # the likeliest are chosen by them
        fields["logprobs"] = logprobs or 0
    return convert(fields, SamplingParams)


def seed_of(seed: int | None, candidate: int) -> int:
    """Derive a candidate's seed from the client's seed and its number; draw one if the client gave none."""
    if seed is None:
        return random.getrandbits(63)
    if candidate == 0:
        return seed % (1 << 63)
    return int.from_bytes(blake2b(f"{seed}/{candidate}".encode(), digest_size=8).digest()) >> 1


def _max_tokens(request: GenerateRequest, model: ServedModel, num_prompt_tokens: int) -> int:
    chat = isinstance(request, ChatCompletionRequest)
    asked, longest = request.max_new_tokens, model.max_model_len
    room = longest - num_prompt_tokens
    if asked is not None:
        if asked > room:
            new_name = getattr(request, "max_completion_tokens", None) is not None
            param = "max_completion_tokens" if new_name else "max_tokens"
            raise ContextTooLong(longest, num_prompt_tokens, asked, param=param)
        return asked
    if room < 1:
        raise ContextTooLong(longest, num_prompt_tokens, None, param="messages" if chat else "prompt")
    return min(room, max(0, model.defaults.max_new_tokens) or (room if chat else COMPLETION_MAX_TOKENS))


def _check_unusual(fields: dict[str, Any], vocab_size: int) -> None:
    """Check the fields that few requests set. Raises InvalidRequest."""
    for name in ("logit_bias", "stop_token_ids", "logprob_token_ids"):
        bad = [token_id for token_id in fields.get(name, ()) if token_id >= vocab_size]
        if bad:
            found = f"token ids {', '.join(map(str, bad))}"
            raise WrongField(name, f"{found} are outside the vocabulary of {vocab_size} tokens")
    if (min_tokens := fields.get("min_tokens", 0)) > (max_tokens := fields["max_tokens"]):
        raise WrongField("min_tokens", f"is {min_tokens}, more than the {max_tokens} tokens allowed at most")
