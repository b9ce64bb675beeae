"""JSON schemas of clients, as llguidance is to follow them.

A schema that is not strict never fails on a keyword: what the grammar cannot hold is left to the model, and
named in the log. A strict one must be held whole, and have the form that OpenAI asks of strict schemas.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

WHITESPACE = r"[ \t]{0,20}(\n[ \t]{0,20}){0,2}"
"""Between JSON's tokens: bounded, for small models would go on with newlines for ever."""
OPENS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "$ref")
JOINS = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
"""Keywords beside which ``properties`` do not name all that an object may have."""
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
OF_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_log = logging.getLogger(__name__)
Schema = dict[str, Any]


def guided(schema: Schema, *, lenient: bool = False) -> str:
    """Return the JSON text of the schema with its options for llguidance. An object that names its properties
    has no others, unless its schema allows them. ``lenient``: leave out keywords that a grammar cannot hold.
    """
    if lenient:
        schema = _rebuilt(schema, _without_odd_pattern)
    if not any(_joins_properties(inner) for _, inner in _all(schema)):
        schema = _rebuilt(schema, _closed)
    own = schema.get("x-guidance")
    options = {
        **(own if isinstance(own, dict) else {}), "whitespace_pattern": WHITESPACE, "lenient": lenient,
    }  # fmt: skip
    return json.dumps({**schema, "x-guidance": options})


def strict_fault(schema: Schema) -> str:
    """Return in words why OpenAI would refuse the schema with ``strict: true``; empty if it would not."""
    for path, inner in _all(schema):
        properties = inner.get("properties")
        if not isinstance(properties, dict) and inner.get("type") != "object":
            continue
        if inner.get("additionalProperties") is not False:
            return f"{path or 'the schema'}: a strict object needs `additionalProperties: false`"
        required = inner.get("required")
        missing = sorted(set(properties or ()) - set(required if isinstance(required, list) else ()))
        if missing:
            return f"{path or 'the schema'}: `required` of a strict object lacks {', '.join(missing)}"
    return ""


def _all(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield the schema and all within it, each with its path."""
    yield path, schema
    for keyword, inner in schema.items():
        if keyword in OF_NAMES and isinstance(inner, dict):
            found = list(inner.items())
        elif keyword in OF_LISTS and isinstance(inner, list):
            found = list(enumerate(inner))
        elif keyword in OF_ONE:
            found = [("", inner)]
        else:
            continue
        for name, each in found:
            if isinstance(each, dict):
                yield from _all(each, f"{path}.{keyword}.{name}".strip("."))


def _rebuilt(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Return a copy in which ``change`` was made to the schema and to all within it."""

    def of(value: Any) -> Any:
        return _rebuilt(value, change) if isinstance(value, dict) else value

    copy = dict(schema)
    for keyword, inner in schema.items():
        if keyword in OF_NAMES and isinstance(inner, dict):
            copy[keyword] = {name: of(each) for name, each in inner.items()}
        elif keyword in OF_LISTS and isinstance(inner, list):
            copy[keyword] = [of(each) for each in inner]
        elif keyword in OF_ONE:
            copy[keyword] = of(inner)
    return change(copy)


def _joins_properties(schema: Schema) -> bool:
    """Whether an object has properties of several schemas: none of them names all."""
    found = [each for word in ("anyOf", "oneOf") if isinstance(each := schema.get(word), list)]
    options = [one for each in found for one in each if isinstance(one, dict)]
    joined = "$ref" in schema or any("properties" in one or "$ref" in one for one in options)
    return "allOf" in schema or ("properties" in schema and joined)


def _closed(schema: Schema) -> Schema:
    named = isinstance(schema.get("properties"), dict)
    if not named or any(keyword in schema for keyword in (*OPENS, *JOINS)):
        return schema
    return {**schema, "additionalProperties": False}


def _without_odd_pattern(schema: Schema) -> Schema:
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or not is_odd(pattern):
        return schema
    return {keyword: value for keyword, value in schema.items() if keyword != "pattern"}


@lru_cache(maxsize=1024)
def is_odd(pattern: str) -> bool:
    """Whether no grammar can hold the pattern, because it looks ahead or back."""
    reason = LLMatcher.validate_grammar(LLMatcher.grammar_from_regex(pattern))
    if reason:
        _log.info("a schema's pattern is left to the model: %s", ascii(pattern[:200]))
    return bool(reason)
