"""Grammars of arguments as Gemma 4 writes them: ``{key:value,...}``, keys bare and texts between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ..chat_output.argument_types import kinds_of, resolved
from ..errors import WrongField
from .json_schemas import JOINS, OPENS, guided
from .parameter_grammar import (
    ANY_TEXT,
    UNIONS,
    Term,
    check_held,
    escaped,
    in_order,
    quoted,
    text_rule,
    texts_of,
)

NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
TEXTS = {"minLength", "maxLength", "pattern", "format"}
OBJECTS = {"properties", "required", "additionalProperties"}
ARRAYS = {"items", "minItems", "maxItems"}
PLAIN = ("boolean", "integer", "null", "number")
"""Types whose values are written as in JSON."""
NOT_HELD = {
    "allOf", "not", "if", "dependentSchemas", "dependentRequired", "patternProperties", "propertyNames",
    "unevaluatedProperties", "minProperties", "maxProperties", "prefixItems", "contains", "uniqueItems",
}  # fmt: skip
BOUNDS = {*NUMBERS, *TEXTS, *OBJECTS, *ARRAYS, *UNIONS, *NOT_HELD, "type", "enum", "const"}
MAX_DEPTH = 64
MAX_VALUES = 5000
"""A bound on the rules of one schema, because nested unions multiply."""
COMMA = ' "," '
KEY = r"[A-Za-z_][A-Za-z0-9_.-]*"
BARE_KEY = re.compile(r'[^\s"<{}\[\],:]([^<{}\[\],:]*[^\s<{}\[\],:])?')
Schema = dict[str, Any]


def gemma_rules(quote: str, tool: int, schema: Schema, term: Term, *, lenient: bool) -> Iterator[str]:
    """Yield the rules of ``args_<tool>``, one object. ``quote``: the mark around texts.

    Properties come in their order, and those not required may be missing. Raises InvalidRequest for a
    property name that cannot stand bare, and where a strict schema cannot be held.
    """
    rules, found = _Rules(quote, f"v_{tool}", schema, term, lenient), resolved(schema, schema)
    start = rules.value({**(found if isinstance(found, dict) else {}), "type": "object"})
    yield f"args_{tool}: {start}"
    yield from rules.lines


class _Rules:
    """Writes one rule a value."""

    def __init__(self, quote: str, name: str, root: Schema, term: Term, lenient: bool) -> None:
        self.lines: list[str] = []
        self._quote, self._mark, self._term = quote, term(quote), term
        self._name, self._root, self._lenient = name, root, lenient
        self._known: dict[int, tuple[str, Schema]] = {}  # by the schema's id, which lives as long
        self._any_name = ""
        self._depth = 0

    def value(self, schema: Any) -> str:
        """Return the name of the rule of a value that the schema allows."""
        if isinstance(schema, dict) and schema.keys() & BOUNDS:
            check_held(schema, {"$ref"}, self._lenient)  # what stands beside a reference is left out
        schema = resolved(schema, self._root)
        if schema is False:
            check_held({"false": False}, {"false"}, self._lenient)
        if not isinstance(schema, dict) or not schema.keys() & BOUNDS:
            return self._any()
        if known := self._known.get(id(schema)):
            return known[0]
        if self._depth >= MAX_DEPTH or len(self._known) >= MAX_VALUES:
            raise _too_large()
        name = f"{self._name}_{len(self._known)}"
        self._known[id(schema)] = name, schema
        self._depth += 1
        self.lines.append(f"{name}: {' | '.join(self._forms(name, schema))}")
        self._depth -= 1
        return name

    def _forms(self, name: str, schema: Schema) -> list[str]:
        """Return the ways to write a value, each as Lark has it; their own rules begin with ``name``."""
        kinds = kinds_of(schema, self._root)
        if kinds == {"string"}:
            return [self._text(name, schema)]
        if kinds and kinds.isdisjoint(("string", "array", "object")):
            around: Schema = {
                word: self._root[word] for word in ("$defs", "definitions") if word in self._root
            }
            return [f"%json {guided({**around, **schema}, lenient=self._lenient)}"]
        check_held(schema, NOT_HELD, self._lenient)
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            check_held(schema, BOUNDS - {"type", "enum" if "enum" in schema else "const"}, self._lenient)
            if right := [each for each in values if not kinds or kinds_of({"const": each}, {}) & kinds]:
                return [self._literal(value) for value in right]
            check_held(schema, {"enum", "const"}, self._lenient)
        for word in sorted(schema.keys() & UNIONS):
            if isinstance(options := schema[word], list) and options:
                return self._options(word, schema, options)
        return self._by_kind(name, schema, kinds or _inferred(schema)) or [self._any()]

    def _options(self, word: str, schema: Schema, options: list[Any]) -> list[str]:
        """Return the values of a union; what stands beside it holds for each."""
        beside = {key: value for key, value in schema.items() if key in BOUNDS and key != word}
        if beside.keys() - {"type"}:
            check_held(schema, {word}, self._lenient)
        found = [resolved(option, self._root) for option in options]
        return [self.value(_both(beside, one) if beside and isinstance(one, dict) else one) for one in found]

    def _by_kind(self, name: str, schema: Schema, kinds: frozenset[str]) -> list[str]:
        found = []
        if plain := [kind for kind in PLAIN if kind in kinds]:
            bounds = {word: schema[word] for word in NUMBERS if word in schema}
            found.append(f"%json {guided({**bounds, 'type': plain}, lenient=self._lenient)}")
        if "string" in kinds:
            found.append(self._text(name, schema))
        if "array" in kinds:
            found.append(self._array(schema))
        if "object" in kinds:
            found.append(self._object(name, schema))
        return found

    def _text(self, name: str, schema: Schema) -> str:
        texts = texts_of(schema, self._root, lenient=self._lenient)
        self.lines.append(text_rule(f"{name}_text", texts, self._quote, self._term))
        return f"{self._mark} {name}_text"

    def _array(self, schema: Schema) -> str:
        one = self.value(True if "prefixItems" in schema else schema.get("items", True))
        low, high = schema.get("minItems"), schema.get("maxItems")
        low = low if isinstance(low, int) else 0
        if isinstance(high, int) and high < 1:
            return '"[" "]"'
        last = high - 1 if isinstance(high, int) else ""
        more = "" if last == 0 else f'("," {one}){{{max(low - 1, 0)},{last}}}'
        return f'"[" ({one} {more}){"" if low > 0 else "?"} "]"'

    def _object(self, name: str, schema: Schema) -> str:
        """See ``json_schemas.guided``: an object that names its properties has no others, unless the schema
        allows them."""
        properties, required = schema.get("properties"), schema.get("required")
        other = schema.get("additionalProperties")
        is_named = isinstance(properties, dict)
        inner: Schema = dict(properties) if isinstance(properties, dict) else {}
        must = required if isinstance(required, list) else []
        is_open = any(schema.get(word) for word in OPENS) or any(word in schema for word in JOINS)
        is_open = is_open or (not is_named and other is not False)
        if other is not False:
            inner |= {key: True for key in must if isinstance(key, str) and key not in inner}
        items = []
        for i, (key, each) in enumerate(inner.items()):
            self.lines.append(f"{name}_p_{i}: {quoted(_bare(key) + ':')} {self.value(each)}")
            items.append((f"{name}_p_{i}", key in must))
        if is_open:
            others = f" & ~/({'|'.join(map(escaped, inner))})\\x{{3a}}/" if inner else ""
            key = f"{name}_key".upper()
            self.lines += [f"{key}: /{KEY}:/{others}", f"{name}_other: {key} {self.value(other)}"]
        self.lines += in_order(f"{name}_all", items, ",", f"{name}_other" if is_open else "")
        return f'"{{" {name}_all "}}"'

    def _literal(self, value: Any, depth: int = 0) -> str:
        if depth > MAX_DEPTH:
            raise _too_large()
        match value:
            case str():
                return f"{self._mark} {quoted(value)} {self._mark}"
            case dict():
                pairs = (
                    f"{quoted(_bare(key) + ':')} {self._literal(each, depth + 1)}"
                    for key, each in value.items()
                )
                return f'"{{" {COMMA.join(pairs)} "}}"'
            case list():
                return f'"[" {COMMA.join(self._literal(each, depth + 1) for each in value)} "]"'
            case _:
                return quoted(json.dumps(value))

    def _any(self) -> str:
        """Return the name of the rule of any value at all."""
        if not self._any_name:
            name = self._any_name = f"{self._name}_any"
            plain = f"%json {guided({'type': list(PLAIN)})}"
            members, elements = (f'({each} ("," {each})*)?' for each in (f"{name}_pair", name))
            self.lines += [
                f'{name}: {self._mark} {name}_text | {plain} | "{{" {members} "}}" | "[" {elements} "]"',
                f"{name}_pair: /{KEY}:/ {name}",
                text_rule(f"{name}_text", ANY_TEXT, self._quote, self._term),
            ]
        return self._any_name


def _too_large() -> WrongField:
    return WrongField("tools", "this model's calls cannot hold so large or so deep a schema")


def _inferred(schema: Schema) -> frozenset[str]:
    """Return the types that a schema without ``type`` bounds."""
    words = {"number": NUMBERS, "string": TEXTS, "object": OBJECTS, "array": ARRAYS}
    return frozenset(kind for kind, own in words.items() if schema.keys() & own)


def _both(one: Schema, other: Schema) -> Schema:
    """Return a schema that bounds a value as both do; where both have a keyword, as the other does."""
    joined = {**one, **other}
    if isinstance(mine := one.get("properties"), dict) and isinstance(its := other.get("properties"), dict):
        joined["properties"] = {**mine, **its}
    if isinstance(first := one.get("required"), list) and isinstance(second := other.get("required"), list):
        joined["required"] = [*first, *second]
    return joined


def _bare(key: str) -> str:
    if BARE_KEY.fullmatch(key) is None:
        raise WrongField("tools", f"this model's calls cannot hold the property name {key!r}; rename it")
    return key
