"""Grammars of arguments that are written one by one, each as text between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..chat_output.argument_types import kinds_of, resolved
from ..chat_output.call_formats import MARK, CallFormat
from ..errors import WrongField
from .json_schemas import JOINS, OPENS, guided, is_odd

Term = Callable[[str], str]
"""A mark as Lark writes it: a string in quotes or, where it is one, a special token's number."""
ANYTHING = "(?s:.*)"
ANY_TEXT = f"/{ANYTHING}/"
FREE = {"type", "title", "description", "default", "examples", "anyOf"}
"""Keywords that bound only the kind of a value."""
UNIONS = {"anyOf", "oneOf"}
NOT_OF_TEXT = {"format", "not", "allOf", "if"}
"""Keywords to which only a JSON string can be held; for ``format`` see FORMATS."""
_DAY = (
    "[12][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = "([01][0-9]|2[0-3])(:[0-5][0-9]){2}([.][0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OF_DAY = "T(nH(nM(nS)?)?|nM(nS)?|nS)".replace("n", "[0-9]{1,4}")
_OF_YEAR = "(nY(nM(nD)?)?|nM(nD)?|nD)".replace("n", "[0-9]{1,4}")
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "duration": f"P([0-9]{{1,4}}W|{_OF_DAY}|{_OF_YEAR}({_OF_DAY})?)",
    "email": f"[A-Za-z0-9_+-]+([.][A-Za-z0-9_+-]+)*@{_LABEL}([.]{_LABEL})+",
    "hostname": f"{_LABEL}([.]{_LABEL})*",
    "ipv4": f"{_BYTE}([.]{_BYTE}){{3}}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""JSON Schema's formats (RFC 3339 and others), without leap days: a regular expression counts no years."""


def parameter_rules(
    form: CallFormat, tool: int, schema: dict[str, Any], term: Term, *, lenient: bool
) -> Iterator[str]:
    """Yield the rules of ``args_<tool>``: the properties in their order, those not required may be missing.

    Where the schema names none or joins others, any may come, any number of times. Raises InvalidRequest
    where a strict schema cannot be held.
    """
    rules, found = _Rules(form, schema, term, lenient), resolved(schema, schema)
    schema = found if isinstance(found, dict) else {}
    check_held(schema, {*JOINS, "patternProperties"}, lenient)
    properties = schema.get("properties")
    named = isinstance(properties, dict) and not any(word in schema for word in JOINS)
    required = schema.get("required") or ()
    items = (
        [(key, inner, key in required) for key, inner in properties.items()] if named and properties else []
    )
    is_open = not named or any(schema.get(word) for word in OPENS)
    for i, (key, inner, _) in enumerate(items):
        yield from rules.parameter(f"p_{tool}_{i}", key, inner)
    if is_open:
        yield from rules.any_parameter(f"any_{tool}")
    separator = ", " if form.body == "python" else ""
    ordered = [(f"p_{tool}_{i}", must) for i, (_, _, must) in enumerate(items)]
    yield from in_order(f"args_{tool}", ordered, separator, f"any_{tool}" if is_open else "")


class _Rules:
    """Writes the rules of single parameters."""

    def __init__(self, form: CallFormat, schema: dict[str, Any], term: Term, lenient: bool) -> None:
        self._schema, self._term, self._lenient = schema, term, lenient
        self._is_python = form.body == "python"
        self._before, rest = form.parameter.split("$key")
        self._middle, self._after = rest.split("$value")

    def parameter(self, name: str, key: str, schema: Any) -> Iterator[str]:
        """Yield the rules of the parameter ``key``."""
        kinds, middle = kinds_of(schema, self._schema), self._middle
        is_text = kinds == {"string"}
        is_free = not is_text and (not kinds or "string" in kinds) and self._is_free(schema)
        if "$string" in middle and is_free:
            yield from self._either(name, key, schema, kinds)
            return
        middle = middle.replace("$string", "true" if is_text else "false")
        yield f"{name}: {self._terms(f'{self._before}{key}{middle}')} {name}_value"
        if self._is_python and is_text and not resolved(schema, self._schema).keys() & NOT_OF_TEXT:
            # in JSON's quotes or in Python's
            quoted = rf"/'[^'\\\x00-\x1f]*'/ & (/'/ ({self._texts(schema)}) /'/)"
            yield f"{name}_value: {name}_json | {name.upper()}\n{name}_json: {self._json(schema, kinds)}"
            yield f"{name.upper()}: {quoted}"
        elif not self._is_python and (is_text or is_free):
            yield self._text_rule(f"{name}_value", self._texts(schema) if is_text else ANY_TEXT)
        else:
            yield f"{name}_value: {self._json(schema, kinds)} {self._terms(self._after)}"

    def _is_free(self, schema: Any, free: set[str] = FREE) -> bool:
        """Whether the schema bounds nothing but the kind of a value. ``free``: keywords that do not."""
        schema = resolved(schema, self._schema)
        if not isinstance(schema, dict):
            return True
        options = schema.get("anyOf", [])
        bounds = schema.keys() - free or not isinstance(options, list)
        return not bounds and all(self._is_free(one, FREE - UNIONS) for one in options)

    def _either(self, name: str, key: str, schema: Any, kinds: frozenset[str]) -> Iterator[str]:
        """Yield the rules of a parameter that is text or JSON, and declares which."""
        text, value = (f"{self._before}{key}{self._middle}".replace("$string", w) for w in ("true", "false"))
        yield f"{name}: {self._terms(text)} {name}_text | {self._terms(value)} {name}_json"
        yield self._text_rule(f"{name}_text", ANY_TEXT)
        yield f"{name}_json: {self._json(schema, kinds)} {self._terms(self._after)}"

    def any_parameter(self, name: str) -> Iterator[str]:
        """Yield the rules of a parameter that the schema does not name."""
        key = "/[A-Za-z_][A-Za-z0-9_]*/" if self._is_python else "/[^<>\\s=]+/"
        if '"' in self._middle:
            key = '/[^<>"\\s=]+/'
        middle = self._terms(self._middle.replace("$string", "true"))
        yield f"{name}: {self._terms(self._before)} {key} {middle} {name}_value"
        if self._is_python:
            yield f"{name}_value: %json {{}}"
        else:
            yield self._text_rule(f"{name}_value", ANY_TEXT)

    def _json(self, schema: Any, kinds: frozenset[str]) -> str:
        if self._is_python and kinds == {"boolean"} and self._is_free(schema):
            return '("True" | "False")'
        around: dict[str, Any] = {
            word: self._schema[word] for word in ("$defs", "definitions") if word in self._schema
        }
        inner = schema if isinstance(schema, dict) else {}
        return f"%json {guided({**around, **inner}, lenient=self._lenient)}"

    def _texts(self, schema: Any) -> str:
        return texts_of(schema, self._schema, lenient=self._lenient)

    def _text_rule(self, name: str, texts: str) -> str:
        return text_rule(name, texts, self._after, self._term)

    def _terms(self, text: str) -> str:
        return terms(text, self._term)


def texts_of(schema: Any, root: Any, *, lenient: bool, odd: set[str] = NOT_OF_TEXT) -> str:
    """Return a terminal of the texts that the schema within ``root`` allows. ``odd``: keywords that it cannot
    hold."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return ANY_TEXT
    form = FORMATS.get(str(schema.get("format")))
    check_held(schema, odd - {"format"} if form else odd, lenient)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return f"/({'|'.join(escaped(value) for value in values if isinstance(value, str))})/"
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    held = [f"/(?s:.{{{low},{high}}})/" if low or high != "" else ANY_TEXT]
    if isinstance(pattern := schema.get("pattern"), str) and not (lenient and is_odd(pattern)):
        held.append(_whole(pattern))
    if form:
        held.append(f"/{form}/")
    options = schema.get("anyOf", schema.get("oneOf"))
    if options and isinstance(options, list) and not odd & UNIONS:
        inner = (texts_of(one, root, lenient=lenient, odd=NOT_OF_TEXT | UNIONS) for one in options)
        held.append(f"({' | '.join(inner)})")
    return " & ".join(held)


def text_rule(name: str, texts: str, after: str, term: Term) -> str:
    """Return the rule of a text that ends at the mark in ``after``: lazily, or where the mark is a token."""
    if (mark := MARK.search(after)) and not term(mark[0]).startswith('"'):
        rest = terms(after[mark.end() :], term)
        space = "\\n" if mark.start() else ""
        text = f"{name.upper()}: ({texts}) /{space}/"
        return f"{name}: {name.upper()} {term(mark[0])} {rest}\n{text}"
    return f"{name}[suffix={json.dumps(after)}]: {texts}"


def in_order(
    name: str, items: Sequence[tuple[str, bool]], separator: str = "", more: str = ""
) -> Iterator[str]:
    """Yield the rules of ``name``: each of ``items``, rules and whether they must come, in their order, and
    then any number of ``more``."""
    between = f"{json.dumps(separator)} " if separator else ""
    for begun in ("", "_more") if separator else ("",):  # _more: an item stands before
        for i, (item, must) in enumerate(items):
            before, rest = between if begun else "", f"{name}_{i + 1}"
            skipped, after = "" if must else f" | {rest}{begun}", "_more" if separator else ""
            yield f"{name}_{i}{begun}: {before}{item} {rest}{after}{skipped}"
        first = f"{more} ({between}{more})*" if not begun else f"({between}{more})+"
        yield f"{name}_{len(items)}{begun}: " + (f'"" | {first}' if more else '""')
    yield f"{name}: {name}_0"


def check_held(schema: dict[str, Any], odd: set[str], lenient: bool) -> None:
    if not lenient and (found := schema.keys() & odd):
        raise WrongField(
            "tools", f"this model's calls cannot hold a strict schema to `{min(found)}`; leave it out"
        )


def _whole(pattern: str) -> str:
    """Return a terminal of whole texts in which the pattern is found."""
    parts, depth = [list[str]()], 0
    slashed = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern)
    for token in re.findall(r"\\.|\[\^?]?(?:\\.|[^]\\])*+]?|.", slashed, re.DOTALL):
        depth += (token == "(") - (token == ")")
        if token == "|" and not depth:
            parts.append([])
        else:
            parts[-1].append(token)
    whole = []
    for part in parts:
        begins, ends = part[:1] == ["^"], part[-1:] == ["$"]
        inner = "".join(part[begins : len(part) - ends])
        whole.append(f"{'' if begins else ANYTHING}({inner}){'' if ends else ANYTHING}")
    return f"/{'|'.join(whole)}/"


def escaped(text: str) -> str:
    """Return a regular expression of the text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def terms(text: str, term: Term) -> str:
    """Return a text in Lark's terms: its marks, and what stands between them."""
    parts = re.split(f"({MARK.pattern})", text)
    return " ".join(term(part) if MARK.fullmatch(part) else quoted(part) for part in parts if part)


def quoted(text: str) -> str:
    """Return a text as Lark's string."""
    return json.dumps(text, ensure_ascii=False)
