"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from .fields import STRING, invalid, only, scalars, schema
from .sampling import MAX_CHOICES, SamplingFields

MAX_PROMPTS = 2048


def prompts(value: Any) -> list[str] | list[list[int]]:
    """A string, token ids, or a list of either: always returned as a list of prompts."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise invalid(
            "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
        )
    if not value:
        raise invalid("must not be empty")
    kinds = set(map(type, value))
    if kinds == {int}:
        value, kinds = [value], {list}
    if len(value) > MAX_PROMPTS:
        raise invalid(f"has {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    if kinds == {str}:
        return _strings(value)
    if kinds == {list}:
        return _id_lists(value)
    raise invalid("must not mix strings, token ids and lists, nor hold anything else")


def _strings(texts: list[str]) -> list[str]:
    if not all(texts):
        raise invalid("must not be empty")
    return texts


def _id_lists(lists: list[list[Any]]) -> list[list[int]]:
    for ids in lists:
        if not ids:
            raise invalid("must not be empty")
        if set(map(type, ids)) != {int}:
            raise invalid("token ids must be integers")
        if min(ids) < 0:
            raise invalid("token ids must not be negative")
    return lists


_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT = schema(
    STRING,
    _IDS,
    *({"type": "array", "items": kind, "minItems": 1, "maxItems": MAX_PROMPTS} for kind in (STRING, _IDS)),
)


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(prompts), PROMPT]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    """Those of the tokenizer before each prompt, usually BOS; by default they are."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[Any, AfterValidator(only(None, "")), WithJsonSchema({"enum": [None, ""]})] = None

    LOGPROBS: ClassVar[tuple[str, str]] = "logprobs", "`logprobs` 0"
    _own_scalars = scalars("echo", "add_special_tokens", "logprobs", "best_of")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_candidates(self) -> int:
        """See ``SamplingFields``: the best ``n`` of them are given back."""
        return self.best_of or self.n or 1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise invalid(f"best_of: is {self.best_of}, less than the {n} choices of `n`")
        if self.stream and self.num_candidates > n:
            raise invalid("best_of: cannot be streamed when more than `n`; which are best shows at the end")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens: must be at least 1, or 0 with `echo` to score the prompt")
        return self
