"""Grammars that hold an answer to tool calls, or to a thought and then to a format: llguidance's Lark, put together of named parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from .reasoning import CLOSE as THOUGHT_ENDS
from .reasoning import OPEN as THOUGHT_BEGINS
from .tool_choice import Tool, parameters_of
from .tool_parsers import ARGS, CLOSE, OPEN, TOOL_CALLS, ToolStyle

NEWLINE, PARAMETERS = "\n", '"parameters": '
WHITESPACE = r"[ \n\t]{0,20}"
Term = Callable[[str], str]
"""A mark as Lark writes it: a string, or a special token's number."""


def call_grammar(style: ToolStyle, tools: Sequence[Tool], term: Term, *, parallel: bool, has_args_mark: bool) -> bytes:
    """One call of one of ``tools`` or, with ``parallel``, several, in the way that the model was taught."""
    names = [tool.function.name for tool in tools]
    calls = [f"call_{i}: {_one(style, name, f'args_{i}', term, has_args_mark)}" for i, name in enumerate(names)]
    arguments = [f"args_{i}: %json {_bounded(parameters_of(tool))}" for i, tool in enumerate(tools)]
    any_call = "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))
    return "\n".join([f"start: {_several(style, term, parallel, has_args_mark)}", any_call, *calls, *arguments]).encode()


def after_thought(grammar: bytes, term: Term, special: bool, *, opened: bool) -> bytes:
    """The same, after a thought. ``opened``: the prompt has begun it; otherwise it may be left out. ``special``: its mark is a token."""
    if special:
        thought = f"thought: THOUGHT {term(THOUGHT_ENDS)} SPACE\nTHOUGHT: /(?s:.*)/"
    else:
        thought = f"thought: closed SPACE\nclosed[suffix={json.dumps(THOUGHT_ENDS)}]: /(?s:.*)/"
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
    """As llguidance's JSON lists them."""
    text = grammar.decode()
    if not text.startswith("{"):
        return [{"lark_grammar": text}]
    parts: list[dict[str, Any]] = json.loads(text)["grammars"]
    return parts


def _one(style: ToolStyle, name: str, arguments: str, term: Term, has_args_mark: bool) -> str:
    opening, named, taken = _text(f'{{"name": {json.dumps(name)}, '), _text('"arguments": '), _text("}")
    match style:
        case "hermes":
            return f"{term(OPEN)} {_text(NEWLINE)} {opening} {named} {arguments} {taken} {_text(NEWLINE)} {term(CLOSE)}"
        case "llama3":
            return f"{opening} {_text(PARAMETERS)} {arguments} {taken}"
        case "mistral" if has_args_mark:
            return f"{term(TOOL_CALLS)} {_text(name)} {term(ARGS)} {arguments}"
        case "mistral":
            return f"{opening} {named} {arguments} {taken}"


def _several(style: ToolStyle, term: Term, parallel: bool, has_args_mark: bool) -> str:
    if style == "mistral" and not has_args_mark:
        more = ' (", " call)*' if parallel else ""
        return f'{term(TOOL_CALLS)} "[" call{more} "]"'
    if not parallel or style == "llama3":  # Llama 3 was taught one call at a time
        return "call"
    return 'call ("\\n" call)*' if style == "hermes" else "call call*"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _bounded(schema: str) -> str:
    value = json.loads(schema)
    own = value.get("x-guidance")
    return json.dumps({**value, "x-guidance": {**(own if isinstance(own, dict) else {}), "whitespace_pattern": WHITESPACE}})
