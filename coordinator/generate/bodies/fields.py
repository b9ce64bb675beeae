"""The base of all bodies: strictness, checks, and schemas of fields whose check is a function."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

MAX_TOKENS = 1 << 20
INT64 = 1 << 63
NULL: dict[str, Any] = {"type": "null"}
STRING: dict[str, Any] = {"type": "string", "minLength": 1}
MAX_SCALAR_CHARS = 32
UNKNOWN_EVERY_S = 10.0
MAX_UNKNOWN = 20
_log = logging.getLogger(__name__)
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    def unknown_fields(self) -> list[str]:
        """Return the paths of unknown fields that have a value, here and in all objects within."""
        extra = self.model_extra
        found = sorted(name for name in extra if extra[name] is not None) if extra else []
        for name in sorted(self.model_fields_set):
            value = getattr(self, name)
            if isinstance(value, str):  # as most fields of a chat's messages are
                continue
            if isinstance(value, Body):
                found += [f"{name}.{inner}" for inner in value.unknown_fields()]
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                found += [
                    f"{name}[{i}].{inner}" for i, each in enumerate(value) for inner in each.unknown_fields()
                ]
        return found


def invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid", "{message}", {"message": message})


def only(*allowed: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value not in allowed:
            raise invalid(f"must be {' or '.join(map(json.dumps, allowed))} on this server")
        return value

    return check


def scalar_of(value: Any) -> Any:
    """Return the number, true or false that a string holds; all else as given."""
    if not isinstance(value, str) or len(value) > MAX_SCALAR_CHARS:
        return value
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
    return found if isinstance(found, int | float) else value


def scalars(*names: str) -> Any:
    """Return a validator of fields whose numbers and truth values may come as strings, as in vLLM."""
    return field_validator(*names, mode="before")(scalar_of)


def schema(*kinds: dict[str, Any]) -> WithJsonSchema:
    """Return the JSON schema of a field whose check is a function."""
    return WithJsonSchema({"anyOf": [*kinds]})


class UnknownFields:
    """Log which fields of requests this server ignores: at most one line every ``UNKNOWN_EVERY_S``
    seconds."""

    def __init__(self) -> None:
        self._quiet_until = float("-inf")

    def note(self, names: Sequence[str]) -> None:
        """Log the names of one request's unknown fields, of which there are usually none."""
        if not names or (now := monotonic()) < self._quiet_until:
            return
        self._quiet_until = now + UNKNOWN_EVERY_S
        shown = ", ".join(ascii(name[:64]) for name in names[:MAX_UNKNOWN])
        _log.info("ignored unknown fields of a request: %s", shown)


Refused = Mapping[str, tuple[str, tuple[Any, ...]]]
"""Fields that are not built, by name: the reason in the error, and the values that change nothing."""
IGNORED = {  # and with a line in the log fields of no server
    # OpenAI
    "store": "whether the service keeps the answer",
    "prompt_cache_retention": "how long a cache keeps the prompt",
    "prompt_cache_options": "how a cache keeps the prompt",
    # vLLM
    "spaces_between_special_tokens": "fast tokenizers, the only ones here, add no spaces of their own",
    "include_reasoning": "thoughts have a field of their own, which a client need not read",
    "early_stopping": "of beam search, which is refused",
    "length_penalty": "of beam search, which is refused",
    "stream_interval": "how often a stream has a chunk",
    "session_id": "where it runs; use prompt_cache_key",
    "return_token_offsets": "of vLLM's render endpoints",
    "return_mm_kwargs": "of vLLM's render endpoints",
    "routed_experts_prompt_start": "of experts' numbers, which are refused",
    # SGLang
    "stream_reasoning": "when thoughts are sent, not what they are",
    "return_cached_tokens_details": "what more is reported",
    "rid": "the request's name; use request_id",
    "custom_labels": "labels of metrics",
    "ngram_corpus_id": "how fast it runs",
    "routed_experts_start_len": "of experts' numbers, which are refused",
    "data_parallel_rank": "where it runs",
    "routed_dp_rank": "where it runs",
    "disagg_prefill_dp_rank": "where it runs",
    "bootstrap_host": "where it runs",
    "bootstrap_port": "where it runs",
    "bootstrap_room": "where it runs",
    # llama.cpp
    "cache_prompt": "what is kept for the next request",
    "id_slot": "where it runs",
    "timings_per_token": "what more is reported",
    "return_progress": "what more is reported",
}
"""By name: what it is about, which is why it cannot change an answer."""

OWN_SAMPLER = "this sampler is not built"
ADAPTER = "name the adapter in `model`; GET /v1/models lists those there are"
REFUSED: Refused = {
    # OpenAI
    "audio": ("this model gives text alone", ()),
    "prediction": ("predicted outputs are not built", ()),
    "moderation": ("answers are not moderated here", ()),
    "web_search_options": ("this server does not search the web", ()),
    "extra_body": ("an argument of OpenAI's Python client; its fields stand in the body itself", ({},)),
    # vLLM
    "use_beam_search": ("beam search is not built; `n` with `best_of` samples several", (False,)),
    "prompt_embeds": ("prompts are text or token ids", ()),
    "logits_processors": ("processors of requests are not built", ([],)),
    "watermarking": ("answers are not marked", (False,)),
    "return_prompt_text": ("the prompt's text is not reported; use /tokenize", (False,)),
    "mm_processor_kwargs": ("the checkpoint's own files decide how images are taken", ({},)),
    "media_io_kwargs": ("images are read in one way", ({},)),
    "ec_transfer_params": ("the server itself moves images", ({},)),
    "kv_transfer_params": ("the server itself moves KV blocks", ({},)),
    "vllm_xargs": ("it is for plugins of vLLM", ({},)),
    "thinking_token_budget": ("a bound on thoughts is not built", ()),
    "repetition_detection": ("it is not built", (False,)),
    "guided_whitespace_pattern": ("white space in JSON is fixed: at most two newlines in a row", ()),
    # SGLang
    "json_object": ("use `response_format`", (False,)),
    "stop_regex": ("only strings stop an answer; use `stop`", ([], "")),
    "no_stop_trim": ("use `include_stop_str_in_output`", (False,)),
    "lora_path": (ADAPTER, ()),
    "session_params": ("use `prompt_cache_key` or the messages so far", ({},)),
    "custom_logit_processor": ("processors of requests are not built", ("",)),
    "custom_params": ("processors of requests are not built", ({},)),
    "extra_key": ("use `cache_salt`", ("",)),
    "images_config": ("the checkpoint's own files decide how images are taken", ({},)),
    "return_routed_experts": ("experts' numbers are not reported", (False,)),
    "return_hidden_states": ("hidden states are not reported", (False,)),
    "separate_reasoning": ("a thought is always `reasoning_content`", (True,)),
    "input_ids": ("use /v1/completions with token ids", ()),
    "input_embeds": ("prompts are text or token ids", ()),
    # llama.cpp
    "n_predict": ("use `max_tokens`", ()),
    "n_keep": ("use `truncate_prompt_tokens`", (0,)),
    "n_probs": ("use `logprobs`", (0,)),
    "repeat_penalty": ("use `repetition_penalty`", (1,)),
    "repeat_last_n": ("penalties count the whole sequence", (-1,)),
    "mirostat": (OWN_SAMPLER, (0,)),
    "typical_p": (OWN_SAMPLER, (1,)),
    "tfs_z": (OWN_SAMPLER, (1,)),
    "top_a": (OWN_SAMPLER, (0,)),
    "top_n_sigma": (OWN_SAMPLER, (-1, 0)),
    "xtc_probability": (OWN_SAMPLER, (0,)),
    "dry_multiplier": (OWN_SAMPLER, (0,)),
    "dynatemp_range": (OWN_SAMPLER, (0,)),
    "samplers": ("the order of samplers is fixed", ([],)),
    "lora": (ADAPTER, ([],)),
    "thinking_forced_open": ("the chat template decides it", (False,)),
    "parse_tool_calls": ("calls are read where tools are offered", (True,)),
    "reasoning_format": ("a thought is always `reasoning_content`", ("auto", "deepseek")),
    # TGI
    "do_sample": ("use `temperature`: 0 is greedy", (True,)),
    "watermark": ("answers are not marked", (False,)),
    "adapter_id": (ADAPTER, ()),
}


def check_others(given: Mapping[str, Any] | None, refused: Refused = REFUSED, path: str = "") -> None:
    """Raise PydanticCustomError for a field that would change the answer and is not built."""
    for name, value in (given or {}).items():
        why, neutral = refused.get(name, ("", ()))
        if why and value is not None and value not in neutral:
            raise invalid(f"{path}{name}: is not supported here: {why}")
