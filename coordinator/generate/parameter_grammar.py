"""Grammars of arguments that are written one by one, each as text between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from ..chat_output.argument_types import kinds_of, resolved
from ..chat_output.call_formats import MARK, CallFormat
from .json_schemas import JOINS, OPENS, guided, is_odd

ANYTHING = "(?s:.*)"


def parameter_rules(
    form: CallFormat, tool: int, schema: dict[str, Any], term: Callable[[str], str], *, lenient: bool
) -> Iterator[str]:
    """Yield the rules of ``args_<tool>``: the properties in their order, those not required may be missing.

    Where the schema names none or joins others, any may come, any number of times.
    """
    rules = _Rules(form, schema, term, lenient)
    properties = schema.get("properties")
    named = isinstance(properties, dict) and not any(word in schema for word in JOINS)
    required = schema.get("required") or ()
    items = (
        [(key, inner, key in required) for key, inner in properties.items()] if named and properties else []
    )
    is_open = not named or any(schema.get(word) for word in OPENS)
    name, separator = f"args_{tool}", ", " if form.body == "python" else ""
    between = f"{json.dumps(separator)} " if separator else ""
    for i, (key, inner, _) in enumerate(items):
        yield from rules.parameter(f"p_{tool}_{i}", key, inner)
    if is_open:
        yield from rules.any_parameter(f"any_{tool}")
    for begun in ("", "_more") if separator else ("",):  # _more: a parameter stands before
        for i, (_, _, must) in enumerate(items):
            before, rest = between if begun else "", f"{name}_{i + 1}"
            skipped, after = "" if must else f" | {rest}{begun}", "_more" if separator else ""
            yield f"{name}_{i}{begun}: {before}p_{tool}_{i} {rest}{after}{skipped}"
        first = f"any_{tool} ({between}any_{tool})*" if not begun else f"({between}any_{tool})+"
        yield f"{name}_{len(items)}{begun}: " + (f'"" | {first}' if is_open else '""')
    yield f"{name}: {name}_0"


class _Rules:
    """Writes the rules of single parameters."""

    def __init__(
        self, form: CallFormat, schema: dict[str, Any], term: Callable[[str], str], lenient: bool
    ) -> None:
        self._schema, self._term, self._lenient = schema, term, lenient
        self._is_python = form.body == "python"
        self._before, rest = form.parameter.split("$key")
        self._middle, self._after = rest.split("$value")

    def parameter(self, name: str, key: str, schema: Any) -> Iterator[str]:
        """Yield the rules of the parameter ``key``."""
        kinds, middle = kinds_of(schema, self._schema), self._middle
        if "$string" in middle and (not kinds or {"string"} < kinds):
            yield from self._either(name, key, schema, kinds)
            return
        middle = middle.replace("$string", "true" if kinds == {"string"} else "false")
        yield f"{name}: {self._terms(f'{self._before}{key}{middle}')} {name}_value"
        if self._is_python and kinds == {"string"}:  # in JSON's quotes or in Python's
            quoted = rf"/'[^'\\\x00-\x1f]*'/ & /'({self._pattern(schema)})'/"
            yield f"{name}_value: {name}_json | {name.upper()}\n{name}_json: {self._json(schema, kinds)}"
            yield f"{name.upper()}: {quoted}"
        elif self._is_python or (kinds and "string" not in kinds):
            yield f"{name}_value: {self._json(schema, kinds)} {self._terms(self._after)}"
        else:
            yield self._text_rule(f"{name}_value", self._pattern(schema) if kinds == {"string"} else ANYTHING)

    def _either(self, name: str, key: str, schema: Any, kinds: frozenset[str]) -> Iterator[str]:
        """Yield the rules of a parameter that is text or JSON, and declares which."""
        text, value = (f"{self._before}{key}{self._middle}".replace("$string", w) for w in ("true", "false"))
        yield f"{name}: {self._terms(text)} {name}_text | {self._terms(value)} {name}_json"
        yield self._text_rule(f"{name}_text", ANYTHING)
        yield f"{name}_json: {self._json(schema, kinds)} {self._terms(self._after)}"

    def any_parameter(self, name: str) -> Iterator[str]:
        """Yield the rules of a parameter that the schema does not name."""
        key = "/[A-Za-z_][A-Za-z0-9_]*/" if self._is_python else "/[^<>\\s=]+/"
        if "$string" in self._middle:
            key = '/[^<>"\\s=]+/'
        middle = self._terms(self._middle.replace("$string", "true"))
        yield f"{name}: {self._terms(self._before)} {key} {middle} {name}_value"
        if self._is_python:
            yield f"{name}_value: %json {{}}"
        else:
            yield self._text_rule(f"{name}_value", ANYTHING)

    def _json(self, schema: Any, kinds: frozenset[str]) -> str:
        if self._is_python and kinds == {"boolean"}:
            return '("True" | "False")'
        around: dict[str, Any] = {
            word: self._schema[word] for word in ("$defs", "definitions") if word in self._schema
        }
        inner = schema if isinstance(schema, dict) else {}
        return f"%json {guided({**around, **inner}, lenient=self._lenient)}"

    def _pattern(self, schema: Any) -> str:
        """Return a regular expression of the strings that the schema allows."""
        schema = resolved(schema, self._schema)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            return "|".join(_escaped(str(value)) for value in values)
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        if isinstance(pattern := schema.get("pattern"), str) and not (self._lenient and is_odd(pattern)):
            return _whole(pattern).replace("/", "\\/")
        return f"(?s:.{{{low},{high}}})" if low or high else ANYTHING

    def _text_rule(self, name: str, pattern: str) -> str:
        """Return the rule of a text that ends at the closing mark: lazily, or where the mark is a token."""
        if (mark := MARK.search(self._after)) and not self._term(mark[0]).startswith('"'):
            rest = self._terms(self._after[mark.end() :])
            space = "\\n?" if mark.start() else ""
            text = f"{name.upper()}: /({pattern}){space}/"
            return f"{name}: {name.upper()} {self._term(mark[0])} {rest}\n{text}"
        return f"{name}[suffix={json.dumps(self._after)}]: /{pattern}/"

    def _terms(self, text: str) -> str:
        parts = re.split(f"({MARK.pattern})", text)
        return " ".join(
            self._term(p) if MARK.fullmatch(p) else json.dumps(p, ensure_ascii=False) for p in parts if p
        )


def _whole(pattern: str) -> str:
    """Return what whole texts match in which the pattern is found."""
    inner = re.sub(r"\\.|\[(\\.|[^]])*]", "", pattern)
    while inner != (inner := re.sub(r"\([^()]*\)", "", inner)):
        pass
    parts = [pattern] if "|" not in inner else pattern.split("|") if inner == pattern else []
    whole = [
        f"{'' if part.startswith('^') else ANYTHING}({part.removeprefix('^').removesuffix('$')})"
        f"{'' if part.endswith('$') else ANYTHING}"
        for part in parts
    ]
    return "|".join(whole) or ANYTHING


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "\\n")
