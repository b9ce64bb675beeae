"""Request bodies, checked once at the edge. Wrong types are refused, nulls mean "not given", unknown fields are kept apart.

What depends on the model (context length, vocabulary size, chat template) is checked in ``sampling_params`` and ``prompts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from .chat_output.tool_choice import MAX_TOOLS, TOOL_CHOICE, Tool, check_tool_choice
from .output_format import (
    GUIDED,
    RESPONSE_FORMAT,
    STRUCTURED_OUTPUTS,
    OutputFormat,
    check_guided,
    check_response_format,
    check_structured_outputs,
)

MAX_PROMPTS = 2048
MAX_CHOICES = 128
MAX_MESSAGES = 10_000
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_TOKENS = 1 << 20
MAX_TIMEOUT_S = 86_400
INT64 = 1 << 63


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    def unknown_fields(self) -> list[str]:
        """Names of fields that this server does not know."""
        return sorted(self.model_extra or ())


def _invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid", "{message}", {"message": message})


def _stop(value: Any) -> list[str] | None:
    """One string or several, as a list."""
    strings = [value] if isinstance(value, str) else value
    if strings is None or strings == []:
        return None
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise _invalid("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS or any(not 1 <= len(s) <= MAX_STOP_CHARS for s in strings):
        raise _invalid(f"takes at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters")
    return strings


def _logit_bias(value: Any) -> dict[int, float] | None:
    """Token ids (JSON object keys, so strings) to biases; names every key that is no token id."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _invalid("must be an object of token ids and biases")
    bad = [key for key in value if not key.isascii() or not key.isdigit() or len(key) > 18]
    if bad:
        raise _invalid(f"these keys are not token ids: {', '.join(map(repr, bad[:20]))}")
    wrong = [key for key, bias in value.items() if type(bias) not in (int, float) or not -100 <= bias <= 100]
    if wrong:
        raise _invalid(f"the biases of these keys are not numbers from -100 to 100: {', '.join(wrong[:20])}")
    if len(value) > 1024:
        raise _invalid(f"has {len(value)} entries; at most 1024 are allowed")
    return {int(key): float(bias) for key, bias in value.items()}


def _prompt(value: Any) -> list[str] | list[list[int]]:
    """A string, token ids, or a list of either: always returned as a list of prompts."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise _invalid("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if not value:
        raise _invalid("must not be empty")
    kinds = set(map(type, value))
    if kinds == {int}:
        value, kinds = [value], {list}
    if len(value) > MAX_PROMPTS:
        raise _invalid(f"has {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    if kinds == {str}:
        return _strings(value)
    if kinds == {list}:
        return _id_lists(value)
    raise _invalid("must not mix strings, token ids and lists, nor hold anything else")


def _strings(prompts: list[str]) -> list[str]:
    if not all(prompts):
        raise _invalid("must not be empty")
    return prompts


def _id_lists(prompts: list[list[Any]]) -> list[list[int]]:
    for ids in prompts:
        if not ids:
            raise _invalid("must not be empty")
        if set(map(type, ids)) != {int}:
            raise _invalid("token ids must be integers")
        if min(ids) < 0:
            raise _invalid("token ids must not be negative")
    return prompts


def _content(value: Any) -> str | None:
    """Text, or the texts of a list of text parts, one a line."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _invalid("must be a string or a list of text parts")
    return "\n".join(_part(i, part) for i, part in enumerate(value))


def _part(index: int, part: Any) -> str:
    if not isinstance(part, dict):
        raise _invalid(f'part {index} must be an object such as {{"type": "text", "text": "..."}}')
    if part.get("type") != "text":
        raise _invalid(f"part {index} has type {part.get('type')!r}; this model takes only text parts")
    text = part.get("text")
    if not isinstance(text, str):
        raise _invalid(f"part {index} needs a string `text`")
    return text


def _only(*allowed: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value not in allowed:
            raise _invalid(f"must be {' or '.join(map(repr, allowed))} on this server")
        return value

    return check


def _not_zero(value: int) -> int:
    if value == 0:
        raise _invalid("must be a number of tokens, or -1 for as many as there is room for")
    return value


def _schema(*kinds: dict[str, Any]) -> WithJsonSchema:
    """What a field takes whose check is a function."""
    return WithJsonSchema({"anyOf": [*kinds]})


NULL: dict[str, Any] = {"type": "null"}
STRING: dict[str, Any] = {"type": "string", "minLength": 1}
STOP = _schema(
    {**STRING, "maxLength": MAX_STOP_CHARS},
    {"type": "array", "items": {**STRING, "maxLength": MAX_STOP_CHARS}, "maxItems": MAX_STOP_STRINGS},
    NULL,
)
LOGIT_BIAS = _schema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}, NULL)
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT = _schema(STRING, _IDS, *({"type": "array", "items": kind, "minItems": 1, "maxItems": MAX_PROMPTS} for kind in (STRING, _IDS)))
_TEXT_PART: dict[str, Any] = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
CONTENT = _schema({"type": "string"}, {"type": "array", "items": _TEXT_PART}, NULL)


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(_Body):
    """What both generation endpoints share. Ranges are OpenAI's; the fields it does not have are named as vLLM names them."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
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
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    """Requests with the same key like to meet the same workers."""
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = (
        None
    )
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS), AfterValidator(_not_zero)] | None = None
    """The prompt's last so many tokens are taken; -1: as many as there is room for."""
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    """Seconds until the request must have ended; ours, not OpenAI's."""
    response_format: Annotated[Any, BeforeValidator(check_response_format), RESPONSE_FORMAT] = None
    structured_outputs: Annotated[Any, BeforeValidator(check_structured_outputs), STRUCTURED_OUTPUTS] = None
    guided_json: Annotated[Any, BeforeValidator(check_guided("json")), GUIDED["json"]] = None
    guided_regex: Annotated[Any, BeforeValidator(check_guided("regex")), GUIDED["regex"]] = None
    guided_choice: Annotated[Any, BeforeValidator(check_guided("choice")), GUIDED["choice"]] = None
    guided_grammar: Annotated[Any, BeforeValidator(check_guided("grammar")), GUIDED["grammar"]] = None

    @model_validator(mode="after")
    def _options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("invalid", "stream_options: only allowed with `stream` true")
        return self

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        if (wanted := self.output_format) is None:
            return self
        if len(others := [found.param for found in self._formats()]) > 1:
            raise _invalid(f"{others[1]}: not allowed together with `{others[0]}`")
        if self.ignore_eos or self.min_tokens:
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise _invalid(f"{name}: not allowed together with `{wanted.param}`, which says where the output ends")
        return self

    @property
    def output_format(self) -> OutputFormat | None:
        """What the output is to look like; None: anything."""
        found: OutputFormat | None = (
            self.response_format
            or self.structured_outputs
            or self.guided_json
            or self.guided_regex
            or self.guided_choice
            or self.guided_grammar
        )
        return found

    def _formats(self) -> Iterator[OutputFormat]:
        for found in (
            self.response_format,
            self.structured_outputs,
            self.guided_json,
            self.guided_regex,
            self.guided_choice,
            self.guided_grammar,
        ):
            if found is not None:
                yield found

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_on_every_chunk(self) -> bool:
        return self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def num_candidates(self) -> int:
        """Sequences that are generated for each prompt."""
        return self.n or 1

    @property
    def max_new_tokens(self) -> int | None:
        """What the client asked for."""
        return self.max_tokens


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(_prompt), PROMPT]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[Any, AfterValidator(_only(None, "")), WithJsonSchema({"enum": [None, ""]})] = None

    @property
    def num_candidates(self) -> int:
        """See ``SamplingFields``: the best ``n`` of them are given back."""
        return self.best_of or self.n or 1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise _invalid(f"best_of: is {self.best_of}, less than the {n} choices of `n`")
        if self.stream and self.num_candidates > n:
            raise _invalid("best_of: cannot be streamed when more than `n`; which are best shows at the end")
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("invalid", "max_tokens: must be at least 1, or 0 with `echo` to score the prompt")
        return self


class CalledFunction(_Body):
    name: str
    arguments: str = "{}"


class ToolCall(_Body):
    """A call that the model made earlier in the chat."""

    id: str | None = None
    type: str | None = None
    function: CalledFunction


class Message(_Body):
    """One message of a chat."""

    role: str
    content: Annotated[Any, BeforeValidator(_content), CONTENT] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _known_role(self) -> Self:
        if self.role not in ("system", "developer", "user", "assistant", "tool", "function"):
            raise _invalid(f"unknown role {self.role!r}; use system, developer, user, assistant or tool")
        if self.content is None and self.role != "assistant":
            raise _invalid(f"a message of role {self.role!r} needs `content`")
        return self


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Any, BeforeValidator(check_tool_choice), TOOL_CHOICE] = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[Any, AfterValidator(_only(None, ["text"])), WithJsonSchema({"enum": [None, ["text"]]})] = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    """For the chat template, if it knows of it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("invalid", "top_logprobs: only allowed with `logprobs` true")
        if self.max_tokens == 0:
            raise PydanticCustomError("invalid", "max_tokens: must be at least 1")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """See ``SamplingFields``."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def template_variables(self) -> dict[str, Any]:
        """Beside messages and tools."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    @model_validator(mode="after")
    def _tools_to_choose_from(self) -> Self:
        if self.tool_choice in (None, "none", "auto"):
            return self
        if not self.tools:
            raise _invalid("tool_choice: needs `tools` to choose from")
        if not self.forced_tools:
            raise _invalid(f"tool_choice: there is no function {self.tool_choice.function.name!r} in `tools`")
        if self.ignore_eos or self.min_tokens:
            raise _invalid(f"{'ignore_eos' if self.ignore_eos else 'min_tokens'}: not allowed where a tool call must be made")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """What the model is told of."""
        return [] if self.tool_choice == "none" or not self.tools else self.tools

    @property
    def forced_tools(self) -> list[Tool]:
        """One of these must be called; empty: as the model likes."""
        if not self.tools or self.tool_choice in (None, "none", "auto"):
            return []
        if self.tool_choice == "required":
            return self.tools
        return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]


class TokenizeRequest(_Body):
    """POST /tokenize: either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("invalid", "prompt: give either `prompt` or `messages`")
        return self


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=INT64)]], Field(max_length=MAX_TOKENS)]
