"""Answers of each family over HTTP, whole and streamed, with marks that are tokens of their own or text."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from coordinator.chat_output.families import STYLES, WRITERS, Call
from coordinator.http.test_calls_at_will import with_marks
from support.http_fakes import sentencepiece_tokenizer
from support.tool_answers import ASK, NOW, Answering
from tokenizers import AddedToken

from splitserve.coordinator.chat_output.call_formats import ToolStyle
from splitserve.coordinator.chat_output.style import ChatStyle
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.coordinator.text.tokenizer import Tokenizer

NOTE: Any = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {"properties": {"title": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALLS: list[Call] = [("note", {"title": 'Zwölf 🥊 日本\n{"', "days": 3}), ("now", {})]
THOUGHT = "Hm, 🥊?"


def style_of(tools: ToolStyle) -> ChatStyle:
    """The family, thinking in its own way."""
    thoughts: Any = {s: s for s in ("gpt_oss", "mistral", "gemma4")}.get(tools, "think")
    return ChatStyle(tools, thoughts)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("tools", STYLES)
async def test_thoughts_and_calls_over_http(
    answering: Answering, model: ServedModel, tools: ToolStyle, special: bool
) -> None:
    style = style_of(tools)
    marks = style.thought_marks
    assert marks is not None
    opens, closes = (
        marks[:2] if tools != "gpt_oss" else (f"{marks.opens}<|message|>", "<|end|><|start|>assistant")
    )
    text = f"{opens}{THOUGHT}{closes}{WRITERS[tools](CALLS)}"
    served = with_marks(model, style, special)
    client, _ = await answering(text, style, of=served)
    whole = await client.chat.completions.create(**ASK, tools=[NOTE, NOW])
    message, reason = whole.choices[0].message, whole.choices[0].finish_reason
    assert (message.content, reason) == (None, "tool_calls")
    assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"] == THOUGHT
    assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == CALLS
    given = served.tokenizer.fast.encode(text, add_special_tokens=False).ids
    thought = whole.usage.completion_tokens_details.reasoning_tokens
    assert served.tokenizer.fast.decode(given[:thought], skip_special_tokens=False).startswith(
        f"{opens}{THOUGHT}"
    )
    assert thought <= len(
        served.tokenizer.fast.encode(f"{opens}{THOUGHT}{closes}", add_special_tokens=False).ids
    )

    thoughts, names, arguments, content, usage = "", list[str](), ["", ""], "", None
    options: Any = {"include_usage": True}
    async for chunk in await client.chat.completions.create(
        **ASK, tools=[NOTE, NOW], stream=True, stream_options=options
    ):
        usage = chunk.usage or usage
        for delta in (choice.delta for choice in chunk.choices):
            assert delta.model_extra.get("reasoning") == delta.model_extra.get("reasoning_content")
            thoughts += delta.model_extra.get("reasoning") or ""
            content += delta.content or ""
            for call in delta.tool_calls or ():
                names += [call.function.name] if call.function.name else []
                arguments[call.index] += call.function.arguments or ""
    assert (thoughts, names, content) == (THOUGHT, ["note", "now"], "")
    assert arguments == [call.function.arguments for call in message.tool_calls]
    assert usage.completion_tokens_details.reasoning_tokens == thought


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    "tools",
    ["hermes", "glm45", "deepseek_v3", "deepseek_v31", "granite", "phi4", "kimi_k2", "gpt_oss", "gemma4"],
)
async def test_marks_that_are_tokens_are_text_where_the_model_spells_them_out(
    answering: Answering, model: ServedModel, tools: ToolStyle, plain: bool
) -> None:
    """gpt-oss that explained its own format had its answer cut there, and a call made of the example."""
    style = style_of(tools)
    served = with_marks(model, style, special=True, plain=plain)
    assert style.thought_marks is not None
    opens, closes = style.thought_marks[:2]
    if tools == "gpt_oss":
        opens, closes = f"{opens}<|message|>", f"{closes}<|start|>assistant<|channel|>final<|message|>"
    example = f"So {closes} then {WRITERS[tools](CALLS)} or 1 < 2 <"

    def ids(text: str) -> list[int]:
        return [int(i) for i in served.tokenizer.fast.encode(text, add_special_tokens=False).ids]

    spelled = [token_id for char in example for token_id in ids(char)]
    thought = [*ids(opens), *spelled]
    client, _ = await answering([*thought, *ids(closes), *spelled], style, of=served)
    whole = await client.chat.completions.create(**ASK, tools=[NOTE, NOW])
    message = whole.choices[0].message
    assert (message.content, message.model_extra["reasoning"], message.tool_calls) == (example, example, None)
    assert len(thought) <= whole.usage.completion_tokens_details.reasoning_tokens <= len(thought) + 1

    texts = {"content": "", "reasoning": ""}
    async for chunk in await client.chat.completions.create(
        **ASK, tools=[NOTE, NOW], stream=True, stop="<%%"
    ):
        delta = chunk.choices[0].delta
        assert delta.tool_calls is None
        texts["content"] += delta.content or ""
        texts["reasoning"] += delta.model_extra.get("reasoning") or ""
    assert texts == {"content": example, "reasoning": example}


SPELLED = "a < b </tool_call> </arg_value> <|end|> <|message|> <｜tool▁call▁end｜> <|tool_call_end|> <"


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("tools", STYLES)
async def test_arguments_may_spell_out_marks(
    answering: Answering, model: ServedModel, tools: ToolStyle, plain: bool
) -> None:
    style = style_of(tools)
    served = with_marks(model, style, special=True, plain=plain)

    def ids(text: str) -> list[int]:
        return [int(i) for i in served.tokenizer.fast.encode(text, add_special_tokens=False).ids]

    before, _, after = WRITERS[tools]([("note", {"title": "@", "days": 3}), ("now", {})]).partition("@")
    spelled = [token_id for char in SPELLED for token_id in ids(char)]
    client, _ = await answering([*ids(before), *spelled, *ids(after)], style, of=served)
    whole = await client.chat.completions.create(**ASK, tools=[NOTE, NOW])
    message, arguments = whole.choices[0].message, ["", ""]
    assert (message.content, [call.function.name for call in message.tool_calls]) == (None, ["note", "now"])
    assert json.loads(message.tool_calls[0].function.arguments) == {"title": SPELLED, "days": 3}
    async for chunk in await client.chat.completions.create(**ASK, tools=[NOTE, NOW], stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            arguments[call.index] += call.function.arguments or ""
    assert arguments == [call.function.arguments for call in message.tool_calls]


@pytest.mark.parametrize("name", ["a\\ud83d", "\\udc00"])
async def test_a_call_whose_name_is_no_text_is_content(answering: Answering, name: str) -> None:
    """Half a surrogate pair in JSON: it cannot be sent on, and the whole answer was lost."""
    answer = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    client, _ = await answering(answer)
    message = (await client.chat.completions.create(**ASK, tools=[NOTE, NOW])).choices[0].message
    assert (message.content, message.tool_calls) == (answer, None)


@pytest.mark.parametrize("num_chars", range(296, 301))
async def test_a_call_that_breaks_beside_a_spelled_out_mark(
    answering: Answering, model: ServedModel, num_chars: int
) -> None:
    style = style_of("glm45")
    served = with_marks(model, style, special=True)
    value = "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    answer = f"<tool_call>note\n{value}<arg_key>{'k' * num_chars}<<b"
    client, _ = await answering(answer, style, of=served)
    message = (await client.chat.completions.create(**ASK, tools=[NOTE, NOW])).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["note"]
    assert "<<b".endswith(message.content or "")


async def test_a_call_behind_echoed_text(answering: Answering, model: ServedModel) -> None:
    style = style_of("hermes")
    client, _ = await answering(WRITERS["hermes"](CALLS), style, of=with_marks(model, style, special=True))
    whole = await client.chat.completions.create(
        model="tiny",
        messages=[*ASK["messages"], {"role": "assistant", "content": "1 < 2"}],
        tools=[NOTE, NOW],
        extra_body={"echo": True},
    )
    message = whole.choices[0].message
    assert (message.content, len(message.tool_calls)) == ("1 < 2", 2)


@pytest.mark.parametrize("special", [False, True])
async def test_marks_that_the_tokenizer_itself_spells_out_within_text(
    answering: Answering, model: ServedModel, special: bool
) -> None:
    """SentencePiece's with marks that were added as transformers does by default: found behind a space alone,
    so that the model has learned to write them in pieces."""
    fast, style = sentencepiece_tokenizer(), style_of("hermes")
    fast.add_tokens([AddedToken(m, normalized=True, special=special) for m in style.marks(tools=True)])
    answer = f"<think>Hm</think>{WRITERS['hermes'](CALLS)}"
    assert "</think>" not in fast.encode(answer).tokens
    client, _ = await answering(answer, style, of=dataclasses.replace(model, tokenizer=Tokenizer(fast)))
    message = (await client.chat.completions.create(**ASK, tools=[NOTE, NOW])).choices[0].message
    assert (message.content, message.model_extra["reasoning"], len(message.tool_calls)) == (None, "Hm", 2)
