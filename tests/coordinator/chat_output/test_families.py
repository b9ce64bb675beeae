"""Each family's tool calls: read the same however they are cut, and kept as content where they are none."""

from __future__ import annotations

from time import process_time
from typing import Any

import pytest
from coordinator.chat_output.families import BARE, STYLES, WRITERS, Call, calls_in, content_of
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.coordinator.chat_output.call_formats import ToolStyle
from splitserve.coordinator.chat_output.events import CallStarted, Content, Event, Reasoning, joined
from splitserve.coordinator.chat_output.style import ChatStyle

NOTE = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "sure": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {"$ref": "#/$defs/more"},
        "zip": {"type": "string"},
    },
    "required": ["title", "days"],
    "$defs": {"more": {"type": "object"}},
}
TOOLS: dict[str, Any] = {"note": NOTE, "now": {"type": "object", "properties": {}}}
FULL: dict[str, Any] = {
    "title": "Zwölf \"Boxkämpfer\" 🥊\n\n 'und' \\n {[(",
    "days": 3,
    "share": -2.5,
    "sure": True,
    "tags": ["日本", "a]b"],
    "more": {"a": [1, {"b": None}]},
    "zip": "01234",
}
MARKED = {
    "title": "<tool_call></tool_call> [TOOL_CALLS][ARGS]{} <｜tool▁call▁end｜> <function=x> <arg_key>"
    ' <|tool_call>call:now{}<tool_call|> <|" ',
    "days": -1,
}
CALLS: list[Call] = [("note", FULL), ("now", {}), ("note", MARKED)]


def parsed(style: ChatStyle, *pieces: str, prompt: str = "") -> list[Event]:
    parser = style.parser(TOOLS, prompt)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def answer(style: ToolStyle, calls: list[Call]) -> tuple[str, str]:
    """Calls with text around them where the family writes any, and that text."""
    text = WRITERS[style](calls)
    if style == "gpt_oss":
        return (
            f"<|channel|>commentary<|message|>Sure: <|end|><|start|>assistant{text}<|call|><|start|>assistant"
            "<|channel|>final<|message|>So.",
            "Sure: So.",
        )
    return (text, "") if style in BARE else (f"Sure: é\n{text}\nSo.", "Sure: é\nSo.")


@pytest.mark.parametrize("style", STYLES)
def test_several_calls_between_texts(style: ToolStyle) -> None:
    text, content = answer(style, CALLS)
    events = parsed(ChatStyle(style), text)
    assert calls_in(events) == CALLS
    assert content_of(events) == content
    assert calls_in(parsed(ChatStyle(style), WRITERS[style](CALLS[:1]))) == CALLS[:1]


@pytest.mark.parametrize("style", STYLES)
def test_every_place_of_a_cut_gives_the_same(style: ToolStyle) -> None:
    text, _ = answer(style, CALLS)
    whole = parsed(ChatStyle(style), text)
    assert parsed(ChatStyle(style), *text) == whole
    for at in range(len(text)):
        assert parsed(ChatStyle(style), text[:at], text[at:]) == whole, text[:at]


@pytest.mark.parametrize("style", STYLES)
def test_a_long_call_takes_time_by_its_length_alone(style: ToolStyle) -> None:
    """A call of 200,000 characters took up to 14 s, and no other request was served meanwhile."""
    text = WRITERS[style]([("note", {"title": "x = 1 < 2\n" * 20_000})])
    parser, begin = ChatStyle(style).parser(TOOLS, ""), process_time()
    parser.feed(text)
    parser.finish()
    assert process_time() - begin < 4


PIECES = [
    "{", "}", "[", "]", ",", '"', "\n", " ", "a", "(", ")", "=", "'", "\\", "note", "é", "<",
    "functions.", ":0", "<tool_call>", "</tool_call>", "<|tool_call|>", "<|/tool_call|>", "functools",
    "<|python_tag|>", "<function=note>", "<parameter=title>", "\n</parameter>", "</function>",
    "<arg_key>title</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json\n", "\n```", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "[TOOL_CALLS]",
    "[ARGS]", "<|start|>", "assistant", "<|channel|>", "analysis", "commentary to=functions.note",
    "final", "<|message|>", "<|end|>", "<|call|>", '{"title": "x"}',
    '{"name": "note", "arguments": {"days": 1}}', "note(days=1)", "<think>", "</think>", "5",
    "<|tool_call>call:note{", '<|"|>', "title:", "<tool_call|>", "<|channel>thought\n", "<channel|>",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    style=st.sampled_from(STYLES),
    thoughts=st.sampled_from([None, "think", "gemma4"]),
    parts=st.lists(st.sampled_from(PIECES), max_size=14),
    data=st.data(),
)
def test_how_any_text_is_cut_changes_nothing(
    style: ToolStyle, thoughts: Any, parts: list[str], data: st.DataObject
) -> None:
    text, read = "".join(parts), ChatStyle(style, thoughts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed(read, text)
    assert parsed(read, *pieces) == whole
    assert parsed(read, *text) == whole


MALFORMED: list[tuple[ToolStyle, str]] = [
    ("hermes", '<tool_call>\n{"nam": "note"}\n</tool_call> so'),
    ("hermes", "<tool_call>"),
    ("llama3", '{"name": "nothing", "parameters": {}}'),
    ("pythonic", "[nothing(days=1)]"),
    ("pythonic", "[note(days=)] so"),
    ("pythonic", "[note(1, 2)]"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[note(days=1"),
    ("mistral", "[TOOL_CALLS]note[ARGS]5"),
    ("mistral", '[TOOL_CALLS][{"name": 5}] so'),
    ("qwen3_coder", "<tool_call>\n<func=note>\n</func>\n</tool_call> so"),
    ("qwen3_coder", "<tool_call>\n<function=not e>\n</function>\n</tool_call>"),
    ("glm45", "<tool_call>not e\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call> so"),
    ("glm45", "<tool_call>note"),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>no name<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ("deepseek_v31", "<｜tool▁calls▁begin｜> nothing"),
    ("granite", "<|tool_call|>[5]"),
    ("granite", "<|tool_call|> so"),
    ("phi4", "functools.reduce and <|tool_call|>{}<|/tool_call|>"),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>a b<|tool_call_end|><|tool_calls_section_end|>",
    ),
    ("gemma4", "<|tool_call>call:no name{}<tool_call|> so"),
    ("gemma4", "<|tool_call>[{<tool_call|>"),
    ("gemma4", "<|tool_call>"),
]


@pytest.mark.parametrize(("style", "text"), MALFORMED)
def test_what_is_no_call_is_content(style: ToolStyle, text: str) -> None:
    assert parsed(ChatStyle(style), text) == [Content(text)]
    good = "" if style in BARE else WRITERS[style](CALLS[:1])
    events = parsed(ChatStyle(style), f"{text}\n{good}")
    assert not good or (content_of(events).strip(), calls_in(events)) == (text, CALLS[:1])


@pytest.mark.parametrize(
    ("style", "thoughts", "thought"),
    [
        *((style, "think", "<think>\nHm, {é}?\n</think>\n\n") for style in STYLES if style != "gpt_oss"),
        ("mistral", "mistral", "[THINK]Hm, {é}?\n[/THINK]"),
        ("granite", "granite", "Here is my thought process:\nHm, {é}?\n\nHere is my response:\n"),
        ("gemma4", "gemma4", "<|channel>thought\nHm, {é}?\n<channel|>"),
        ("gpt_oss", "gpt_oss", "<|channel|>analysis<|message|>Hm, {é}?\n<|end|><|start|>assistant"),
    ],
)
def test_a_thought_and_then_calls(style: ToolStyle, thoughts: Any, thought: str) -> None:
    read, text = ChatStyle(style, thoughts), thought + WRITERS[style](CALLS)
    events = parsed(read, text)
    assert isinstance(events[0], Reasoning)
    assert events[0].text.strip() == "Hm, {é}?"
    assert calls_in(events) == CALLS
    assert content_of(events) == ""
    assert parsed(read, *text) == events


def test_ids_that_models_give() -> None:
    style = ChatStyle("kimi_k2")
    ids = [event.id for event in parsed(style, WRITERS["kimi_k2"](CALLS)) if isinstance(event, CallStarted)]
    assert ids == ["functions.note:0", "functions.now:1", "functions.note:2"]
    (started, _) = parsed(ChatStyle("mistral"), "[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}")
    assert started == CallStarted(0, "now", "abcDEF123")


LEFT_OUT: list[tuple[ToolStyle, str]] = [
    ("qwen3_coder", "<function=note>\n<parameter=days>\n3\n</parameter>\n</function>"),
    ("qwen3_coder", "<tool_call>\n<function=note>\n<parameter=days>3</parameter>\n</tool_call>"),
    ("qwen3_coder", "<tool_call><function=note><parameter=days>3</parameter>"),
    ("glm45", "<tool_call>note<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"),
    ("kimi_k2", '<|tool_call_begin|>note<|tool_call_argument_begin|> {"days": 3}'),
    ("deepseek_v31", '<｜tool▁call▁begin｜>note<｜tool▁sep｜>{"days": 3}<｜tool▁call▁end｜>'),
    (
        "deepseek_v32",
        '<｜DSML｜invoke name="note"><｜DSML｜parameter name="days" string="true">3</｜DSML｜parameter>'
        "</｜DSML｜invoke>",
    ),
    ("minimax_m2", '<invoke name="note"><parameter name="days">3</parameter></invoke>'),
    ("granite", '<tool_call>[{"name": "note", "arguments": {"days": 3}}]'),
    ("phi4", 'functools[{"name": "note", "arguments": {"days": 3}}]'),
    ("phi4", '<|tool_call|>{"name": "note", "arguments": {"days": 3}}<|/tool_call|>'),
    ("hermes", '<tool_call>{"name": "note", "arguments": {"days": 3}}}\n</tool_call>'),
    ("llama3", '<|python_start|>{"name": "note", "parameters": {"days": 3}}'),
    ("pythonic", "<|python_start|>[note(days=3)]"),
    ("pythonic", "[note(days=3, )]"),
    ("mistral", '[TOOL_CALLS] [{"name": "note", "arguments": {"days": 3}}]'),
    ("gemma4", "<|tool_call>note{ days : 3 , }"),
    ("gemma4", '<|tool_call>call:note{"days": 3}<tool_call|>'),
    ("gemma4", '<|tool_call>call:note{<|"|>days<|"|>:3}<tool_call|>'),
    ("gemma4", '<|tool_call>{"name": "note", "arguments": {"days": 3}}<tool_call|>'),
]


@pytest.mark.parametrize(("style", "text"), LEFT_OUT)
def test_what_models_leave_out(style: ToolStyle, text: str) -> None:
    events = parsed(ChatStyle(style), text)
    assert calls_in(events) == [("note", {"days": 3})]
    assert content_of(events) == ""


@pytest.mark.parametrize(("style", "name"), [(style, name) for style in STYLES for name in ("add", "note")])
def test_text_that_follows_a_call_without_its_closing_mark(style: ToolStyle, name: str) -> None:
    if style in (*BARE, "gpt_oss", "qwen3_coder", "glm45", "deepseek_v32", "minimax_m2", "seed_oss"):
        return
    text = WRITERS[style]([(name, {"days": 3})])
    closing = text.rindex("}") + 1 + (style in ("granite", "phi4"))
    events = parsed(ChatStyle(style), text[:closing] + "\nAnd so on.")
    assert calls_in(events) == [(name, {"days": 3})]
    assert content_of(events) == "\nAnd so on."


TEMPLATES: list[tuple[str, ChatStyle]] = [
    ("{{ '<tool_call>\\n' }}{{ call | tojson }}{{ '</think>' }}", ChatStyle("hermes", "think")),
    ("<|start_of_role|>assistant<|end_of_role|>{{ '<tool_call>' }}", ChatStyle("hermes")),
    ("<|python_tag|>{{ '\"parameters\": ' }}", ChatStyle("llama3")),
    ("<|header_start|> [func_name1(params_name1=params_value1)] <|python_start|>", ChatStyle("pythonic")),
    ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", ChatStyle("mistral")),
    ("{{ '[THINK]' }}{{ '[/THINK]' }}[TOOL_CALLS]", ChatStyle("mistral", "mistral")),
    ("{{ '<tool_call>\\n<function=' + name + '>' }}", ChatStyle("qwen3_coder")),
    ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key> <think></think>", ChatStyle("glm45", "think")),
    (
        "{{ '<｜tool▁calls▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n' + '```json' }}",
        ChatStyle("deepseek_v3"),
    ),
    ("{{ '<｜tool▁calls▁begin｜>' }}{{ '</think>' }}", ChatStyle("deepseek_v31", "think")),
    ("<｜DSML｜function_calls>\n<think></think>", ChatStyle("deepseek_v32", "think")),
    ("<|start_of_role|><think></think><response></response><|tool_call|>", ChatStyle("granite", "granite33")),
    ("<|start_of_role|>Here is my response: <|tool_call|>", ChatStyle("granite", "granite")),
    ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", ChatStyle("phi4")),
    ("<|tool_calls_section_begin|>", ChatStyle("kimi_k2")),
    ("{{ '<minimax:tool_call>' }}<invoke name={{ '</think>' }}", ChatStyle("minimax_m2", "think")),
    ("<seed:tool_call>\n<function=x> <seed:think></seed:think>", ChatStyle("seed_oss", "seed_oss")),
    ("<|start|>{{ role }}<|channel|>final<|message|>", ChatStyle("gpt_oss", "gpt_oss")),
    ("{{ '<|tool_call>call:' + name }}{{ '<|channel>thought\n<channel|>' }}", ChatStyle("gemma4", "gemma4")),
    ("", ChatStyle("hermes")),
]


@pytest.mark.parametrize(("template", "style"), TEMPLATES)
def test_the_template_shows_the_family(template: str, style: ChatStyle) -> None:
    assert ChatStyle.of(template) == style
    assert ChatStyle.of(template, "kimi_k2", "none") == ChatStyle("kimi_k2")
