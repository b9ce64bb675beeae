"""The fields that both generation endpoints share. Wrong types are refused; null means "not given"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ....transport.messages.fields import MAX_TEMPERATURE
from ..request_ids import CLIENT_ID
from .fields import (
    IGNORED,
    INT64,
    MAX_TOKENS,
    NULL,
    STRING,
    Body,
    Metadata,
    check_others,
    invalid,
    scalars,
    schema,
)
from .output_format import (
    NAMED,
    NAMED_KINDS,
    RESPONSE_FORMAT,
    STRUCTURED_OUTPUTS,
    OutputFormat,
    check_named,
    check_response_format,
    check_structured_outputs,
)

MAX_CHOICES = 128
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_TIMEOUT_S = 86_400
FORMAT_FIELDS = ("response_format", "structured_outputs", *NAMED_KINDS)
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
BadWord = Annotated[str, Field(min_length=1, max_length=128)]
OnTimeout = Literal["timeout", "length", "error"]
"""timeout, length: the answer so far, with this finish reason; error: 504."""


def _stop(value: Any) -> list[str] | None:
    """One string or several, as a list."""
    strings = [value] if isinstance(value, str) else value
    if strings is None or strings == []:
        return None
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise invalid("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid(f"has {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
    if wrong := [len(s) for s in strings if not 1 <= len(s) <= MAX_STOP_CHARS]:
        raise invalid(f"a string of {wrong[0]} characters; 1 to {MAX_STOP_CHARS} are allowed")
    return strings


def _logit_bias(value: Any) -> dict[int, float] | None:
    """Token ids (JSON object keys, so strings) to biases; names every key that is no token id."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid("must be an object of token ids and biases")
    bad = [key for key in value if not key.isascii() or not key.isdigit() or len(key) > 18]
    if bad:
        raise invalid(f"these keys are not token ids: {', '.join(map(repr, bad[:20]))}")
    wrong = [key for key, bias in value.items() if type(bias) not in (int, float) or not -100 <= bias <= 100]
    if wrong:
        raise invalid(f"the biases of these keys are not numbers from -100 to 100: {', '.join(wrong[:20])}")
    if len(value) > 1024:
        raise invalid(f"has {len(value)} entries; at most 1024 are allowed")
    return {int(key): float(bias) for key, bias in value.items()}


def not_zero(value: int) -> int:
    if value == 0:
        raise invalid("must be a number of tokens, or -1 for as many as there is room for")
    return value


STOP = schema(
    {**STRING, "maxLength": MAX_STOP_CHARS},
    {"type": "array", "items": {**STRING, "maxLength": MAX_STOP_CHARS}, "maxItems": MAX_STOP_STRINGS},
    NULL,
)
LOGIT_BIAS = schema(
    {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}, NULL
)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Body):
    """Fields of both generation endpoints. Ranges are OpenAI's; fields that it lacks have vLLM's names."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[Any, BeforeValidator(_logit_bias), LOGIT_BIAS] = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Annotated[Any, BeforeValidator(_stop), STOP] = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=INT64)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=INT64)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: Annotated[str, Field(pattern=rf"^{CLIENT_ID.pattern}$")] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    """Requests with the same key prefer the same workers."""
    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS), AfterValidator(not_zero)] | None = (
        None
    )
    """Number of the prompt's last tokens that are kept; -1: as many as there is room for."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that truncation cuts; right: the prompt's first tokens are kept."""
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log probabilities name tokens ``token_id:17``: a name for each id, also where two have one text."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    logprob_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=20)] | None = None
    """Tokens whose log probabilities are reported at each position, in the place of the likeliest."""
    allowed_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=4096)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=128)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Only requests with the same salt find this one's prompt in the prefix cache."""
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    """Seconds until the request must have ended; ours, not OpenAI's."""
    on_timeout: OnTimeout | None = None
    """The form of an answer that its deadline cuts; ours."""
    response_format: Annotated[Any, BeforeValidator(check_response_format), RESPONSE_FORMAT] = None
    structured_outputs: Annotated[Any, BeforeValidator(check_structured_outputs), STRUCTURED_OUTPUTS] = None
    guided_json: Annotated[Any, BeforeValidator(check_named("guided_json")), NAMED["json"]] = None
    guided_regex: Annotated[Any, BeforeValidator(check_named("guided_regex")), NAMED["regex"]] = None
    guided_choice: Annotated[Any, BeforeValidator(check_named("guided_choice")), NAMED["choice"]] = None
    guided_grammar: Annotated[Any, BeforeValidator(check_named("guided_grammar")), NAMED["grammar"]] = None
    json_schema: Annotated[Any, BeforeValidator(check_named("json_schema")), NAMED["json"]] = None
    regex: Annotated[Any, BeforeValidator(check_named("regex")), NAMED["regex"]] = None
    ebnf: Annotated[Any, BeforeValidator(check_named("ebnf")), NAMED["grammar"]] = None
    grammar: Annotated[Any, BeforeValidator(check_named("grammar")), NAMED["grammar"]] = None
    """The last four: the same in the spellings of SGLang and llama.cpp."""

    LOGPROBS: ClassVar[tuple[str, str]]
    """The field with the number of alternatives, and what asks for log probabilities without any."""

    _scalars = scalars(
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "seed", "n", "max_tokens", "min_tokens", "ignore_eos", "stream", "priority"),
        *("return_token_ids", "truncate_prompt_tokens", "timeout"),
        *("include_stop_str_in_output", "skip_special_tokens", "return_tokens_as_token_ids"),
        *("prompt_logprobs",),
    )

    @model_validator(mode="after")
    def _options_need_stream(self) -> Self:
        check_others(self.model_extra)
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options: only allowed with `stream` true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs: not available with `stream` true")
        if self.allowed_token_ids and self.min_tokens:
            raise invalid("min_tokens: not allowed together with `allowed_token_ids`")
        if self.logprob_token_ids and self.num_logprobs != 0:
            name, wanted = self.LOGPROBS
            raise invalid(
                f"logprob_token_ids: needs {wanted}, and no other number of alternatives in `{name}`"
            )
        return self if self.output_format is None else self._one_format(self.output_format)

    def _one_format(self, wanted: OutputFormat) -> Self:
        if len(others := [found.param for found in self._formats()]) > 1:
            raise invalid(f"{others[1]}: not allowed together with `{others[0]}`")
        if self.ignore_eos or self.min_tokens:
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise invalid(
                f"{name}: not allowed together with `{wanted.param}`, which says where the output ends"
            )
        return self

    def unknown_fields(self) -> list[str]:
        found = [name for name in super().unknown_fields() if name not in IGNORED]
        return found if self.response_format is None else [*found, *self.response_format.unknown]

    @property
    def output_format(self) -> OutputFormat | None:
        """The format of the output; None: any."""
        return next(self._formats(), None)

    def _formats(self) -> Iterator[OutputFormat]:
        given = self.model_fields_set
        for name in FORMAT_FIELDS:
            if name in given and (found := getattr(self, name)) is not None:
                yield found

    @property
    def has_grammar(self) -> bool:
        """Whether the output must follow a grammar, so that workers need a mask."""
        return self.output_format is not None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_on_every_chunk(self) -> bool:
        return (
            self.include_usage
            and self.stream_options is not None
            and bool(self.stream_options.continuous_usage_stats)
        )

    @property
    def obfuscated(self) -> bool:
        """Whether chunks are padded, so that their lengths on the wire do not reveal the tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)

    @property
    def num_logprobs(self) -> int | None:
        """Number of the likeliest tokens reported beside each token; None: no log probabilities."""
        raise NotImplementedError

    @property
    def num_candidates(self) -> int:
        """Number of sequences for each prompt."""
        return self.n or 1

    @property
    def max_new_tokens(self) -> int | None:
        """The client's limit of output tokens."""
        return self.max_tokens
