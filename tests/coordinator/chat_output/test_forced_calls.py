"""Forced tool calls: the grammar makes each family's own form, which its own parser reads."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from ipaddress import IPv4Address
from typing import Annotated, Any
from uuid import UUID

import pytest
from coordinator.chat_output.families import BARE, STYLES, WRITERS, Call, calls_in, content_of
from coordinator.http.test_calls_at_will import followers, with_marks
from jsonschema import validate
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, Field

from splitserve.coordinator.chat_output.call_formats import ToolStyle
from splitserve.coordinator.chat_output.events import joined
from splitserve.coordinator.chat_output.style import ChatStyle
from splitserve.coordinator.errors import InvalidRequest
from splitserve.coordinator.generate.bodies.chat import ChatCompletionRequest
from splitserve.coordinator.generate.grammar import grammar_for
from splitserve.coordinator.generate.prompts import Prompt
from splitserve.coordinator.text.served_model import ServedModel

LIMITED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"enum": ['Ünï/"x"', "b"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
        "sure": {"type": "boolean"},
        "kind": {"type": "string", "pattern": "^[a-c]{1,3}$"},
    },
    "required": ["title", "kind"],
    "additionalProperties": False,
}
BOUND: dict[str, Any] = {
    "type": "object",
    "properties": {
        "grade": {"type": ["string", "null"], "enum": ["x", None]},
        "path": {"type": "string", "pattern": "^a/b+$|^(c[/]|d)+$|\n", "minLength": 2, "maxLength": 4},
        "either": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 3}]},
        "texts": {"anyOf": [{"const": "two\nlines"}, {"type": "string", "maxLength": 1}]},
        "never": {"const": False},
        "empty": {"enum": [""]},
    },
    "required": ["grade", "path", "either", "texts", "never", "empty"],
    "additionalProperties": False,
}
PLAIN_TEXT: tuple[ToolStyle, ...] = (
    *("qwen3_coder", "glm45", "deepseek_v32", "gemma4", "minimax_m2", "seed_oss", "pythonic"),
)
"""Write strings without JSON's quotes."""
FORCED: Any = [
    {"type": "function", "function": {"name": "note", "parameters": LIMITED}},
    {"type": "function", "function": {"name": "now"}},
]
GOOD: list[Call] = [
    ("note", {"title": 'Ünï/"x"', "days": 12, "kind": "ab"}),
    ("now", {}),
    ("note", {"title": "b", "kind": "c"}),
]
NO_MORE: tuple[ToolStyle, ...] = ("llama3", "gpt_oss")  # were taught one call at a time


def forced(model: ServedModel, **fields: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": FORCED, **fields}
    return grammar_for(ChatCompletionRequest.model_validate_json(json.dumps(body)), model, Prompt([], ""))[0]


def writer(style: ToolStyle, special: bool) -> Callable[[list[Call]], str]:
    """How the family's calls are written; Mistral's older models, without ``[ARGS]``, write a list."""
    if style == "mistral" and not special:
        return lambda calls: WRITERS["granite"](calls).replace("<|tool_call|>", "[TOOL_CALLS]")
    return WRITERS[style]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_a_forced_call_has_the_familys_form(model: ServedModel, style: ToolStyle, special: bool) -> None:
    own = ChatStyle.of("", style)
    served = with_marks(model, own, special)
    written = writer(style, special)
    one, all_ = written(GOOD[:1]), written(GOOD)
    bad = [
        written([("note", {**GOOD[0][1], "days": 21})]),
        written([("note", {**GOOD[0][1], "title": "c"})]),
        written([("note", {"title": "b"})]),
        written([("now", {"a": 1})]),
        one.replace("note", "knot"),
        one[: len(one) // 2],
        f"Sure. {one}",
        "",
    ]
    must = forced(served, tool_choice="required")
    expected = [one, written(GOOD[1:2])] + ([] if style in NO_MORE else [all_])
    assert followers(must, [one, written(GOOD[1:2]), all_, *bad], served) == expected
    named = forced(served, tool_choice={"type": "function", "function": {"name": "note"}})
    assert followers(named, [one, written(GOOD[1:2]), all_, *bad], served) == [one]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_the_familys_parser_reads_whatever_is_forced(
    model: ServedModel, style: ToolStyle, special: bool
) -> None:
    own = ChatStyle.of("", style, "none")
    served = with_marks(model, own, special)
    tokenizer = LLTokenizer(served.tokenizer.fast.to_str(), n_vocab=model.vocab_size, eos_token=[1])
    compiled = LLMatcher(tokenizer, forced(served, tool_choice="required").decode(), log_level=0)
    rng = random.Random(f"{style}{special}")
    for _ in range(8):
        ids = drawn(compiled.deep_copy(), rng)
        text = served.tokenizer.fast.decode(ids, skip_special_tokens=False)
        parser = own.parser({"note": LIMITED, "now": None}, "")
        events = joined([*parser.feed(text), *parser.finish()])
        calls = calls_in(events)
        assert calls, text
        assert content_of(events) == ""
        for name, arguments in calls:
            validate(arguments, LIMITED if name == "note" else {"maxProperties": 0})


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("style", PLAIN_TEXT)
def test_text_without_quotes_is_held_to_the_whole_schema(
    model: ServedModel, style: ToolStyle, special: bool
) -> None:
    """Unions, lengths beside a pattern, and alternatives were left to the model, in strict tools too."""
    for arguments in arguments_drawn(model, style, BOUND, special=special):
        validate(arguments, BOUND)


class Formatted(BaseModel):
    """Pydantic writes these formats, and checks them."""

    day: date
    at: time
    moment: datetime
    span: timedelta
    address: IPv4Address
    number: UUID
    mail: Annotated[str, Field(json_schema_extra={"format": "email"}, pattern=r"^[^@ ]+@[^@. ]+[.][^@ ]+$")]
    host: Annotated[str, Field(json_schema_extra={"format": "hostname"}, pattern=r"^[A-Za-z0-9]")]


@pytest.mark.parametrize("style", PLAIN_TEXT[:4])  # pythonic calls hold JSON's strings
def test_text_without_quotes_is_held_to_formats(model: ServedModel, style: ToolStyle) -> None:
    schema = {**Formatted.model_json_schema(), "additionalProperties": False}
    for arguments in arguments_drawn(model, style, schema, special=True):
        Formatted.model_validate(arguments)


def test_a_strict_schema_that_cannot_be_held_is_refused(model: ServedModel) -> None:
    link = {"link": {"type": "string", "format": "uri"}}
    linked = {"properties": link, "required": ["link"], "additionalProperties": False}
    joined = {"anyOf": [linked]}
    for schema, keyword in ((linked, "format"), (joined, "anyOf")):
        strict = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
        with pytest.raises(InvalidRequest, match=f"strict schema to `{keyword}`"):
            forced(with_marks(model, ChatStyle.of("", "glm45"), special=True), tools=[strict])
        forced(with_marks(model, ChatStyle.of("", "hermes"), special=True), tools=[strict])


def arguments_drawn(
    model: ServedModel, style: ToolStyle, schema: dict[str, Any], *, special: bool
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of random calls that the grammar of this strict tool allows, as they are read."""
    own = ChatStyle.of("", style, "none")
    served = with_marks(model, own, special)
    function = {"name": "note", "parameters": schema, "strict": True}
    grammar = forced(served, tools=[{"type": "function", "function": function}], tool_choice="required")
    tokenizer = LLTokenizer(served.tokenizer.fast.to_str(), n_vocab=model.vocab_size, eos_token=[1])
    compiled = LLMatcher(tokenizer, grammar.decode(), log_level=0)
    rng = random.Random(f"{style}{special}")
    for _ in range(8):
        ids = drawn(compiled.deep_copy(), rng)
        text = served.tokenizer.fast.decode(ids, skip_special_tokens=False)
        parser = own.parser({"note": schema}, "")
        calls = calls_in(joined([*parser.feed(text), *parser.finish()]))
        assert calls, text
        yield from (arguments for _, arguments in calls)


def drawn(matcher: LLMatcher, rng: random.Random) -> list[int]:
    """Return the tokens of a random output that the grammar allows."""
    ids: list[int] = []
    for _ in range(3000):
        mask = matcher.compute_bitmask()
        allowed = [8 * i + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]
        if matcher.is_accepting() and ((1 in allowed and rng.random() < 0.5) or allowed == [1]):
            return ids
        ids.append(rng.choice([token for token in allowed if token != 1]))
        assert matcher.consume_token(ids[-1])
    raise AssertionError("the grammar does not end")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_strict_tools_hold_a_call_that_need_not_be(
    model: ServedModel, style: ToolStyle, special: bool
) -> None:
    own = ChatStyle.of("", style)
    if style == "gpt_oss" and not special:
        return  # its marks are tokens always
    served = with_marks(model, own, special)
    schema = {**LIMITED, "required": list(LIMITED["properties"])}
    tools = [
        {"type": "function", "function": {"name": "note", "parameters": schema, "strict": True}},
        FORCED[1],
    ]
    right: list[Call] = [("note", {"title": "b", "days": 3, "sure": True, "kind": "a"})]
    wrong: list[Call] = [("note", {"title": "b", "days": 30, "sure": True, "kind": "a"})]
    good, bad = writer(style, special)(right), writer(style, special)(wrong)
    before, plain = "Sure. ", "No."
    if style == "gpt_oss":
        before = "<|channel|>commentary<|message|>Sure.<|end|><|start|>assistant"
        plain = "<|channel|>final<|message|>No."
    grammar = forced(served, tools=tools)
    assert followers(grammar, [good, bad, plain], served) == [good, plain]
    if style not in BARE:
        assert followers(grammar, [before + good, before + bad], served) == [before + good]


def test_formats_of_gpt_oss_stand_in_its_final_channel(model: ServedModel) -> None:
    served = with_marks(model, ChatStyle.of("", "gpt_oss"), special=True)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    texts = [
        "<|channel|>final<|message|>{}",
        f"{thought}<|channel|>final<|message|>{{}}",
        "{}",
        f"{thought}{{}}",
    ]
    grammar = forced(served, tools=None, response_format={"type": "json_object"})
    assert followers(grammar, texts, served) == texts[:2]
    called = WRITERS["gpt_oss"](GOOD[:1])
    grammar = forced(served, response_format={"type": "json_object"})
    assert followers(grammar, [*texts, thought + called], served) == [*texts[:2], thought + called]
