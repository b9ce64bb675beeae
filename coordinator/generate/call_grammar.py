"""Grammars that hold an answer to tool calls, or to a thought and then to a format: llguidance's Lark, put
together of named parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from ..chat_output.call_formats import CALL_ID, CallFormat
from ..chat_output.harmony import CHANNEL, MESSAGE, NEXT_MESSAGE
from ..chat_output.reasoning import ThoughtMarks
from .bodies.tools import Tool, parameters_of
from .gemma_grammar import gemma_rules
from .json_schemas import guided
from .parameter_grammar import Term, escaped, parameter_rules, quoted, terms

WHITESPACE = r"[ \n\t]{0,20}"
ANYTHING = "/(?s:.*)/"
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def call_grammar(form: CallFormat, tools: Sequence[Tool], term: Term, *, parallel: bool) -> bytes:
    """One call of one of ``tools`` or, with ``parallel``, several, in the way that the model was taught."""
    first, rest = _begin(form)
    start = f"start: {terms(first, term)} {_several(form, rest, term, parallel)}"
    return "\n".join([start, *_calls(form, tools, term), *_arguments(form, tools, term)]).encode()


def calls_at_will(form: CallFormat, tools: Sequence[Tool], term: Term, *, parallel: bool) -> bytes:
    """Any text, and calls in it as the model likes: what has begun as one goes on as one, of one of
    ``tools``. The arguments of a strict tool follow its schema, those of another one are any object."""
    calls = [*_calls(form, tools, term), *_arguments(form, tools, term, at_will=True)]
    if not form.opens:
        return "\n".join(_bare_at_will(form, tools, term, parallel) + calls[-len(tools) :]).encode()
    first, rest = _begin(form)
    several = _several(form, rest, term, parallel)
    if form.opens.startswith(CHANNEL):
        channel, message, more = term(CHANNEL), term(MESSAGE), terms(NEXT_MESSAGE, term)
        preamble = f'({channel} "commentary" {message} ANYTHING {more})?'
        start = f'start: {preamble} ({terms(first, term)} {several} | {channel} "final" {message} ANYTHING)'
        return "\n".join([start, f"ANYTHING: {ANYTHING}", *calls]).encode()
    begin = term(first)
    marks = "|".join(escaped(mark) for mark in sorted({first, *form.openers}) if mark[0] in "<[")
    anything = f"{ANYTHING} & ~/(?s:.*)({marks})(?s:.*)/"  # spelled out a mark would read as a call, too
    before = f"before[suffix={begin}]: {anything}" if begin.startswith('"') else f"before: ANYTHING {begin}"
    again = "(before called)* ANYTHING" if parallel and not form.listed else "ANYTHING | before called"
    return "\n".join(
        [f"start: {again}", f"called: {several}", before, f"ANYTHING: {anything}", *calls]
    ).encode()


def after_thought(grammar: bytes, marks: ThoughtMarks, term: Term, *, opened: bool) -> bytes:
    """The same, after a thought. ``opened``: the prompt has begun it; otherwise it may be left out."""
    closes = term(marks.closes)
    if not closes.startswith('"'):
        thought = f"thought: THOUGHT {closes} SPACE\nTHOUGHT: {ANYTHING}"
    else:
        thought = f"thought: closed SPACE\nclosed[suffix={closes}]: {ANYTHING}"
    opens, answer = terms(marks.opens, term), "@answer"
    if marks.repeated:  # gpt-oss: the answer is a message of its own
        opens, answer = f"{opens} {term(MESSAGE)}", f"{terms(NEXT_MESSAGE.partition('>')[2], term)} @answer"
    start = f"thought {answer}" if opened else f"@answer | {opens} thought {answer}"
    outer = {"name": "start", "lark_grammar": f"start: {start}\n{thought}\nSPACE: /[ \\n]{{0,4}}/\n"}
    first, *more = parts_of(grammar)
    return orjson.dumps({"grammars": [outer, {**first, "name": "answer"}, *more]})


def in_final_channel(grammar: bytes, term: Term) -> bytes:
    """The same, in the message of gpt-oss that is the answer."""
    start = f'start: {term(CHANNEL)} "final" {term(MESSAGE)} @final'
    first, *more = parts_of(grammar)
    outer = {"name": "in_final", "lark_grammar": start}
    return orjson.dumps({"grammars": [outer, {**first, "name": "final"}, *more]})


def either(grammar: bytes, other: bytes) -> bytes:
    """What follows one or the other."""
    outer = {"name": "either", "lark_grammar": "start: @one | @other"}
    (one, *more), (two, *further) = parts_of(grammar), parts_of(other)
    both = [{**one, "name": "one"}, {**two, "name": "other"}]
    return orjson.dumps({"grammars": [outer, *both, *more, *further]})


def parts_of(grammar: bytes) -> list[dict[str, Any]]:
    """Return the parts in llguidance's JSON form."""
    text = grammar.decode()
    if not text.startswith("{"):
        return [{"lark_grammar": text}]
    parts: list[dict[str, Any]] = json.loads(text)["grammars"]
    return parts


def _begin(form: CallFormat) -> tuple[str, str]:
    """Return the mark at which calls begin, and what stands between it and the first call's own text."""
    if form.section[0]:
        mark = form.section[0].rstrip()  # it may be a token, which the line's end is no part of
        return mark, form.section[0][len(mark) :] + form.opens
    return form.opens, "[" if form.listed else ""


def _several(form: CallFormat, rest: str, term: Term, parallel: bool) -> str:
    """One call or several, after the first mark, up to the end."""
    inner = "" if form.listed else form.closes
    more = ""

    def apart(*texts: str) -> str:
        """Each a string of its own: of two that begin alike, llguidance would go on with the longer one."""
        return " ".join(terms(text, term) for text in texts if text)

    if parallel and form.between is not None:
        between = (form.between,) if form.listed else (inner, form.between, form.opens)
        more = f"({apart(*between)} call)*"
    last = form.section[1].lstrip()
    space = form.section[1].removesuffix(last)
    end = terms(f"]{form.closes}", term) if form.listed else apart(inner, space, last)
    return f"{terms(rest, term)} call {more} {end}"


def _calls(form: CallFormat, tools: Sequence[Tool], term: Term) -> list[str]:
    """``call``, without the marks around it: one of ``call_0``, ``call_1``, ..."""
    names = [tool.function.name for tool in tools]
    calls = [f"call_{i}: {_one(form, name, f'args_{i}', term)}" for i, name in enumerate(names)]
    return ["call: " + " | ".join(f"call_{i}" for i in range(len(tools))), *calls]


def _one(form: CallFormat, name: str, arguments: str, term: Term) -> str:
    values = {
        "$name": quoted(json.dumps(name) if form.body == "object" else name),
        "$arguments": arguments,
        "$parameters": arguments,
        "$index": "/[0-9]{1,4}/",
        "$call_id": f"({mark} /[a-zA-Z0-9]{{9}}/)?" if (mark := term(CALL_ID)).startswith("<") else "",
    }
    parts = re.split(r"(\$[a-z_]+)", form.call)
    return " ".join(filter(None, (values.get(part) or terms(part, term) for part in parts)))


def _arguments(
    form: CallFormat, tools: Sequence[Tool], term: Term, *, at_will: bool = False
) -> Iterator[str]:
    """``args_0``, ``args_1``, ... ``at_will``: those of a tool that is not strict are free."""
    for i, tool in enumerate(tools):
        free = at_will and not tool.function.strict
        schema = ANY_OBJECT if free else tool.function.parameters or {"properties": {}}
        lenient = not tool.function.strict
        if form.quote:
            yield "\n".join(gemma_rules(form.quote, i, schema, term, lenient=lenient))
        elif "$parameters" in form.call:
            yield "\n".join(parameter_rules(form, i, schema, term, lenient=lenient))
        else:
            yield f"args_{i}: %json {guided(ANY_OBJECT) if free else parameters_of(tool)}"


def _bare_at_will(form: CallFormat, tools: Sequence[Tool], term: Term, parallel: bool) -> list[str]:
    """Nothing marks a call, which is the whole answer: what names a tool is one, and all else is text. Until
    it has named one, both are possible, so the call may have the white space that the text has."""
    names, space, colon = [tool.function.name for tool in tools], WHITESPACE, f"{WHITESPACE}:{WHITESPACE}"
    any_name = "|".join(map(re.escape, names))
    if form.body == "python":
        head, taken = rf"{space}\[{space}", rf"({any_name})\("
        heads = [rf"{head}{re.escape(name)}\(" for name in names]
        more = f"({quoted(form.between or '')} more)*" if parallel else ""
        tail, end = f'")" {more} "]"', ""
        others = [f'more_{i}: {quoted(name + "(")} args_{i} ")"' for i, name in enumerate(names)]
        others.append("more: " + " | ".join(f"more_{i}" for i in range(len(names))))
    else:
        typed = f'("type"{colon}"function"{space},{space})?'
        head = rf"{space}\{{{space}{typed}"
        # the latter: before the name they may be any tool's
        taken = f'"name"{colon}"({any_name})"|"(parameters|arguments)"'
        given = f'{space},{space}"(parameters|arguments)"{colon}'
        heads = [f'{head}"name"{colon}"{re.escape(name)}"{given}' for name in names]
        tail, end, others = "TAIL", rf"TAIL: /{space}\}}/", []
    tag = term(form.also[0])
    return [
        "start: call | TEXT" + ("" if tag.startswith('"') else f" | {tag} call"),
        "call: " + " | ".join(f"call_{i}" for i in range(len(names))),
        *(f"HEAD_{i}: /{head}/" for i, head in enumerate(heads)),
        *(f"call_{i}: HEAD_{i} args_{i} {tail}" for i in range(len(names))),
        *others,
        end,
        f"TEXT: {ANYTHING} & ~/(?s:{head}({taken}).*)/",
    ]
