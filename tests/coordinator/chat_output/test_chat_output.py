"""Parsers of answers: each format's calls are found, and how a text is cut into pieces changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.coordinator.chat_output.events import (
    CallArguments,
    CallStarted,
    Content,
    Event,
    OutputParser,
    Reasoning,
    joined,
)
from splitserve.coordinator.chat_output.style import ChatStyle

TOOLS = {"get_weather": None, "add": None}
MAKERS: dict[str, Callable[[], OutputParser]] = {
    "hermes": lambda: ChatStyle("hermes").parser(TOOLS, ""),
    "llama3": lambda: ChatStyle("llama3").parser(TOOLS, ""),
    "mistral": lambda: ChatStyle("mistral").parser(TOOLS, ""),
    "think": lambda: ChatStyle(thoughts="think").parser({}, ""),
    "granite33": lambda: ChatStyle("granite", "granite33").parser(TOOLS, ""),
    "thinking": lambda: ChatStyle(thoughts="think").parser(TOOLS, "<think>\n"),
}


def parsed(maker: str, *pieces: str) -> list[Event]:
    parser = MAKERS[maker]()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [CallStarted(index, name), CallArguments(index, arguments)]


W, A = '{"city": "Paris \\"}{\\" 日本"}', '{"a": [1, {"b": -2.5e3}], "c": null}'
THOUGHT = Reasoning("Hm.")
CASES: list[tuple[str, str, list[Event]]] = [
    ("granite33", "<think>Hm.</think>\n<response>\nSo <b>\nit\n</response>\n",
     [THOUGHT, Content("So <b>\nit")]),
    ("granite33", "<think>Hm.</think><response></response>", [THOUGHT]),
    ("granite33", "<think>Hm.</think>So. <respon", [THOUGHT, Content("So. <respon")]),
    ("granite33", f'<think>Hm.</think><|tool_call|>[{{"name": "add", "arguments": {A}}}]</response>',
     [THOUGHT, *call(0, "add", A)]),
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>',
     call(0, "get_weather", W)),
    (
        "hermes",
        f'Sure.\n<tool_call>{{"arguments": {A}, "name": "add"}}</tool_call>\n'
        f'<tool_call>\n{{"name":"add","arguments":{A}}}\n</tool_call>\n',
        [Content("Sure."), *call(0, "add", A), *call(1, "add", A)],
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', call(0, "add", "{}")),
    ("hermes", "<tool_call>not JSON</tool_call> so", [Content("<tool_call>not JSON</tool_call> so")]),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}',
     [Content('<tool_call>{"name": 5, "arguments": {}}')]),
    ("hermes", 'a <tool_ca {"name": 1} <', [Content('a <tool_ca {"name": 1} <')]),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {A[:-3]}', call(0, "add", A[:-3])),
    ("hermes", " \n", [Content(" \n")]),
    ("llama3", f'{{"name": "add", "parameters": {A}}}', call(0, "add", A)),
    ("llama3", f' <|python_tag|>{{"type": "function", "name": "add", "parameters": {A}}}', call(0, "add", A)),
    (
        "llama3",
        f'{{"name": "add", "parameters": {A}}}; {{"name": "get_weather", "parameters": {W}}}\n',
        call(0, "add", A) + call(1, "get_weather", W),
    ),
    ("llama3", '{"answer": 5} is it', [Content('{"answer": 5} is it')]),
    ("llama3", '{"name": "Bob", "parameters": {}}', [Content('{"name": "Bob", "parameters": {}}')]),
    ("llama3", ' Plain {"name": "add"}', [Content(' Plain {"name": "add"}')]),
    ("llama3", "<|python_tag|>print(1)", [Content("<|python_tag|>print(1)")]),
    ("llama3", "<|pyth", [Content("<|pyth")]),
    ("mistral", (f'[TOOL_CALLS] [{{"name": "add", "arguments": {A}}}, {{"name": "get_weather", "arguments": '
    f'{W}}}]'), call(0, "add", A)
     + call(1, "get_weather", W)),
    ("mistral", f"Hm.[TOOL_CALLS]add[ARGS]{A}[TOOL_CALLS]get_weather[ARGS]{W}",
     [Content("Hm."), *call(0, "add", A), *call(1, "get_weather", W)]),
    ("mistral", f"[TOOL_CALLS]add{A}", call(0, "add", A)),
    ("mistral", "[TOOL_CALLS][5]", [Content("[TOOL_CALLS][5]")]),
    ("mistral", "[TOOL_CA", [Content("[TOOL_CA")]),
    ("think", "<think>\nHm, <b>?\n</think>\n\nYes.", [Reasoning("Hm, <b>?\n"), Content("Yes.")]),
    ("think", "  No <think>thoughts</think>", [Content("  No <think>thoughts</think>")]),
    ("think", "<think>and no end </thi", [Reasoning("and no end </thi")]),
    ("think", " <thin", [Content(" <thin")]),
    ("thinking", f'\nSo </think> <tool_call>{{"name": "add", "arguments": {A}}}</tool_call>',
     [Reasoning("So "), *call(0, "add", A)]),
]  # fmt: skip


@pytest.mark.parametrize(("maker", "text", "events"), CASES)
def test_each_format(maker: str, text: str, events: list[Event]) -> None:
    assert parsed(maker, text) == events
    assert parsed(maker, *text) == events


PARTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<think>",
        "</think>",
        "\n",
        " ",
        "[",
        "]",
        "{",
        "}",
        ",",
    ),
    *(
        '{"name": "add", "arguments": {"a": "}\\""}}',
        '{"name": "add", "parameters": {}}',
        ";",
        '"',
        "add",
        '{"name": "x"',
        "é",
        "<",
        "text",
    ),
]


@settings(max_examples=200, deadline=None)
@given(
    maker=st.sampled_from(list(MAKERS)), parts=st.lists(st.sampled_from(PARTS), max_size=12), data=st.data()
)
def test_how_a_text_is_cut_changes_nothing(maker: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(maker, *pieces) == parsed(maker, text)
    assert parsed(maker, *text) == parsed(maker, text)


@pytest.mark.timeout(20)
def test_a_header_of_white_space_without_end_is_read_at_once() -> None:
    """Models repeat themselves; 8,000 spaces held up the coordinator for ten minutes."""
    text = f"<|channel|>{' ' * 4_000}!"
    parser = ChatStyle("gpt_oss", "gpt_oss").parser({}, "")
    assert joined([*parser.feed(text), *parser.finish()]) == [Content(text)]
