"""Grammars that hold an answer to tool calls, or to a thought and then to a format: llguidance's Lark, put
together of named parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from ..chat_output.reasoning import CLOSE as THOUGHT_ENDS
from ..chat_output.reasoning import OPEN as THOUGHT_BEGINS
from ..chat_output.tool_parsers import ARGS, CLOSE, OPEN, PYTHON_TAG, TOOL_CALLS, ToolStyle
from .bodies.tools import Tool, parameters_of
from .json_schemas import guided

NEWLINE, PARAMETERS = "\n", '"parameters": '
WHITESPACE = r"[ \n\t]{0,20}"
ANYTHING = "/(?s:.*)/"
ANY_OBJECT = guided({"type": "object"})
Term = Callable[[str], str]
"""A mark as Lark writes it: a string in quotes or, where it is one, a special token's number."""


def call_grammar(
    style: ToolStyle, tools: Sequence[Tool], term: Term, *, parallel: bool, has_args_mark: bool
) -> bytes:
    """One call of one of ``tools`` or, with ``parallel``, several, in the way that the model was taught."""
    begin = "" if (mark := _mark(style)) is None else term(mark)
    start = f"start: {_several(style, begin, parallel, has_args_mark)}"
    return "\n".join(
        [
            start,
            *_calls(style, tools, term, has_args_mark),
            *_arguments([parameters_of(tool) for tool in tools]),
        ]
    ).encode()


def calls_at_will(
    style: ToolStyle, tools: Sequence[Tool], term: Term, *, parallel: bool, has_args_mark: bool
) -> bytes:
    """Any text, and calls in it as the model likes: what has begun as one goes on as one, of one of
    ``tools``. The arguments of a strict tool follow its schema, those of another one are any object."""
    arguments = _arguments([parameters_of(tool) if tool.function.strict else ANY_OBJECT for tool in tools])
    if style == "llama3":
        return "\n".join(
            [*_llama3_at_will([tool.function.name for tool in tools], term(PYTHON_TAG)), *arguments]
        ).encode()
    mark = _mark(style)
    assert mark is not None, "it tells calls from text"
    begin = term(mark)
    before = f"before[suffix={begin}]: {ANYTHING}" if begin.startswith('"') else f"before: ANYTHING {begin}"
    if style == "mistral" and not has_args_mark:
        start = f"start: ANYTHING | before {_array(parallel)}"
    else:
        start = "start: (before call)* ANYTHING" if parallel else "start: ANYTHING | before call"
    return "\n".join(
        [start, before, f"ANYTHING: {ANYTHING}", *_calls(style, tools, term, has_args_mark), *arguments]
    ).encode()


def after_thought(grammar: bytes, term: Term, special: bool, *, opened: bool) -> bytes:
    """The same, after a thought. ``opened``: the prompt has begun it; otherwise it may be left out.
    ``special``: its mark is a token."""
    if special:
        thought = f"thought: THOUGHT {term(THOUGHT_ENDS)} SPACE\nTHOUGHT: {ANYTHING}"
    else:
        thought = f"thought: closed SPACE\nclosed[suffix={json.dumps(THOUGHT_ENDS)}]: {ANYTHING}"
    start = "start: thought @answer" if opened else f"start: @answer | {term(THOUGHT_BEGINS)} thought @answer"
    outer = {"name": "start", "lark_grammar": f"{start}\n{thought}\nSPACE: /[ \\n]{{0,4}}/\n"}
    first, *more = _parts(grammar)
    return orjson.dumps({"grammars": [outer, {**first, "name": "answer"}, *more]})


def either(grammar: bytes, other: bytes) -> bytes:
    """What follows one or the other."""
    outer = {"name": "either", "lark_grammar": "start: @one | @other"}
    ((one,), (two,)) = _parts(grammar), _parts(other)
    return orjson.dumps({"grammars": [outer, {**one, "name": "one"}, {**two, "name": "other"}]})


def _parts(grammar: bytes) -> list[dict[str, Any]]:
    """Return the parts in llguidance's JSON form."""
    text = grammar.decode()
    if not text.startswith("{"):
        return [{"lark_grammar": text}]
    parts: list[dict[str, Any]] = json.loads(text)["grammars"]
    return parts


def _mark(style: ToolStyle) -> str | None:
    """Return the mark at which a call, or an array of calls, begins."""
    return {"hermes": OPEN, "mistral": TOOL_CALLS, "llama3": None}[style]


def _calls(style: ToolStyle, tools: Sequence[Tool], term: Term, has_args_mark: bool) -> list[str]:
    """``call``, without the mark at its beginning: one of ``call_0``, ``call_1``, ..."""
    names = [tool.function.name for tool in tools]
    calls = [
        f"call_{i}: {_one(style, name, f'args_{i}', term, has_args_mark)}" for i, name in enumerate(names)
    ]
    return ["call: " + " | ".join(f"call_{i}" for i in range(len(tools))), *calls]


def _arguments(schemas: Sequence[str]) -> list[str]:
    """``args_0``, ``args_1``, ..."""
    return [f"args_{i}: %json {schema}" for i, schema in enumerate(schemas)]


def _one(style: ToolStyle, name: str, arguments: str, term: Term, has_args_mark: bool) -> str:
    opening, named, taken = _text(f'{{"name": {json.dumps(name)}, '), _text('"arguments": '), _text("}")
    match style:
        case "hermes":
            return f"{_text(NEWLINE)} {opening} {named} {arguments} {taken} {_text(NEWLINE)} {term(CLOSE)}"
        case "llama3":
            return f"{opening} {_text(PARAMETERS)} {arguments} {taken}"
        case "mistral" if has_args_mark:
            return f"{_text(name)} {term(ARGS)} {arguments}"
        case "mistral":
            return f"{opening} {named} {arguments} {taken}"


def _several(style: ToolStyle, begin: str, parallel: bool, has_args_mark: bool) -> str:
    if style == "mistral" and not has_args_mark:
        return f"{begin} {_array(parallel)}"
    if not parallel or style == "llama3":  # Llama 3 was taught one call at a time
        return f"{begin} call"
    between = ' "\\n"' if style == "hermes" else ""
    return f"{begin} call ({between} {begin} call)*"


def _array(parallel: bool) -> str:
    more = ' (", " call)*' if parallel else ""
    return f'"[" call{more} "]"'


def _llama3_at_will(names: Sequence[str], tag: str) -> list[str]:
    """Nothing marks a call, which is the whole answer: an object that names a tool is one, and all else is
    text. Until it has named one, both are possible, so the call may have whatever white space the text
    has."""
    space, colon = WHITESPACE, f"{WHITESPACE}:{WHITESPACE}"
    typed = f'("type"{colon}"function"{space},{space})?'
    head = rf"{space}\{{{space}{typed}"
    tools = "|".join(map(re.escape, names))
    # the latter: before the name they may be any tool's
    taken = f'"name"{colon}"({tools})"|"(parameters|arguments)"'
    given = f'{space},{space}"(parameters|arguments)"{colon}'
    heads = [f'HEAD_{i}: /{head}"name"{colon}"{re.escape(name)}"{given}/' for i, name in enumerate(names)]
    return [
        "start: call | TEXT" + ("" if tag.startswith('"') else f" | {tag} call"),
        "call: " + " | ".join(f"call_{i}" for i in range(len(names))),
        *heads,
        *(f"call_{i}: HEAD_{i} args_{i} TAIL" for i in range(len(names))),
        rf"TAIL: /{space}\}}/",
        f"TEXT: {ANYTHING} & ~/(?s:{head}({taken}).*)/",
    ]


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
