"""Calls and thoughts of Gemma 4: how they are read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from coordinator.chat_output.families import WRITERS, calls_in, content_of
from coordinator.chat_output.test_families import parsed
from hypothesis import given
from hypothesis import strategies as st

from splitserve.coordinator.chat_output.events import CallArguments, CallStarted, Content, Event, Reasoning
from splitserve.coordinator.chat_output.style import ChatStyle

STYLE = ChatStyle("gemma4", "gemma4")
OPENS, CLOSES, Q = "<|tool_call>", "<tool_call|>", '<|"|>'
TEXT = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: Q not in text + "<")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"\A\w+\Z"), inner, max_size=3),
)


@given(st.dictionaries(st.from_regex(r"\A[a-z_][\w.-]*\Z"), VALUES, max_size=3))
def test_any_arguments_are_read_as_they_were_written(arguments: dict[str, Any]) -> None:
    events = parsed(STYLE, WRITERS["gemma4"]([("note", arguments), ("now", {})]))
    assert calls_in(events) == [("note", arguments), ("now", {})]
    assert content_of(events) == ""


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("{}", {}),
        ("{ }", {}),
        ('{"a": "b", "c": {"d": [1, "e"]}}', {"a": "b", "c": {"d": [1, "e"]}}),
        (r'{a:"two\nlines \"q\" \u00e9 }"}', {"a": 'two\nlines "q" é }'}),
        ('{a:"two\nlines"}', {"a": "two\nlines"}),
        (f"{{{Q}a b:c{Q}:1}}", {"a b:c": 1}),
        (f"{{ a : {Q} b {Q} ,\n c : [ 1 , 2 , ] , }}", {"a": " b ", "c": [1, 2]}),
        ("{a:True,b:None,c:-1.5e3}", {"a": True, "b": None, "c": -1500.0}),
        ("{a:New York,b:2024-05-01,c:01234}", {"a": "New York", "b": "2024-05-01", "c": "01234"}),
        (f"{{a:{Q}{Q},b:[[],{{}}]}}", {"a": "", "b": [[], {}]}),
        (f'{{a:{Q}{{[,:"\\n<|"|{Q}}}', {"a": '{[,:"\\n<|"|'}),
        (f"{{a:{Q}{CLOSES} {OPENS}call:now{{}}{Q}}}", {"a": f"{CLOSES} {OPENS}call:now{{}}"}),
        (f"{{a:{'9' * 5000}}}", {"a": "9" * 5000}),
        ("{a:" * 50 + "1" + "}" * 50, json.loads('{"a":' * 50 + "1" + "}" * 50)),
    ],
)
def test_what_models_write_besides(written: str, read: dict[str, Any]) -> None:
    text = f"So: {OPENS}call:note{written}{CLOSES}"
    events = parsed(STYLE, text)
    assert calls_in(events) == [("note", read)]
    assert content_of(events) == "So:"
    assert parsed(STYLE, *text) == events


@pytest.mark.parametrize(
    "written",
    [
        *("{a}", "{:1}", "{a:}", "{a:1]", "{a:[1}}", "{a:1 2<", "{a b", "{a:{", f"{{a:{Q}b{Q}c}}", "{,}"),
        *(
            f"{{a{Q}:1}}",
            "{a:<b>}",
            f"{{a:b{Q}}}",
            '{"a"b:1}',
            f"{{{'k' * 301}:1}}",
            f"{{{Q}{'k' * 400}",
            "{[",
        ),
    ],
)
def test_arguments_that_break_end_the_call(written: str) -> None:
    """The client has the call by then; what follows is read again."""
    text = f"{OPENS}call:note{written}{CLOSES}{OPENS}call:now{{}}{CLOSES}"
    events = parsed(STYLE, text)
    assert events[0] == CallStarted(0, "note")
    assert parsed(STYLE, *text) == events
    with pytest.raises(ValueError):
        json.loads("".join(e.text for e in events if isinstance(e, CallArguments) and e.call == 0))
    unclosed = written in ("{a b", "{a:{", "{[") or written.startswith(f"{{{Q}")
    assert unclosed or CallStarted(1, "now") in events


@pytest.mark.parametrize("written", ["{", "{a:", "{a:1", "{a:[1", f"{{a:{Q}b{Q}"])
def test_a_call_without_its_bracket_ends_at_its_mark(written: str) -> None:
    events = parsed(STYLE, f"{OPENS}call:note{written}{CLOSES}{OPENS}call:now{{}}{CLOSES}So.")
    assert [each.name for each in events if isinstance(each, CallStarted)] == ["note", "now"]
    assert content_of(events) == "So."


def test_texts_are_passed_on_as_they_come() -> None:
    parser = STYLE.parser({"note": None}, "")
    pieces = [f"{OPENS}call:note{{", f"title:{Q}", 'one "', "two<", "|", f'"|>,days:1{"2"}', f"}}{CLOSES}"]
    assert [parser.feed(piece) for piece in pieces] == [
        [CallStarted(0, "note"), CallArguments(0, "{")],
        [CallArguments(0, '"title": "')],
        [CallArguments(0, 'one \\"')],
        [CallArguments(0, "two")],
        [],
        [CallArguments(0, '", "days": ')],
        [CallArguments(0, "12}")],
    ]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("<|channel>thought\n<channel|>Yes.", [Content("Yes.")]),
        ("<|channel>thought\nHm\n<channel|>\nYes.", [Reasoning("Hm\n"), Content("Yes.")]),
        ("<|channel>thought\nHm", [Reasoning("Hm")]),
        ("Yes.<channel|>", [Content("Yes.<channel|>")]),
        ("<|channel>other", [Content("<|channel>other")]),
    ],
)
def test_thoughts(text: str, events: list[Event]) -> None:
    assert parsed(STYLE, text) == events
    assert parsed(STYLE, *text) == events


def test_a_thought_that_the_prompt_has_begun() -> None:
    begun = "<|turn>model\n<|channel>thought\n"
    assert parsed(STYLE, "Hm<channel|>So.", prompt=begun) == [Reasoning("Hm"), Content("So.")]
    assert parsed(STYLE, "Hm", prompt=f"{begun}<channel|>") == [Content("Hm")]
