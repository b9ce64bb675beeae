"""The output format that a request asks for, as a grammar for the workers' masks.

``response_format`` is OpenAI's; ``structured_outputs`` and the older ``guided_*`` are named as vLLM names
them. A request has at most one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import orjson
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark
from pydantic import WithJsonSchema

from ...errors import WrongField
from ..json_schemas import guided, strict_fault
from .fields import NULL, STRING, invalid

MAX_CHOICES = 1000
MAX_CHARS = 100_000
"""Characters of one schema, regex or grammar, as JSON."""
MAX_EBNF_CHARS = 20_000
BARE = {"type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "items", "$defs"}
"""Keywords that only a schema has, and no object around one."""
EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
KINDS = ("json", "regex", "choice", "grammar", "structural_tag")
Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]
NAMED_KINDS: dict[str, Kind] = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar",
}  # fmt: skip
"""Fields that hold one format each: of older versions of vLLM, of SGLang, of llama.cpp."""


class OutputFormat(NamedTuple):
    """``value``: a schema's JSON text, a regex, a list of strings, a structural tag, or a grammar: EBNF, GBNF
    (``root ::=``) or llguidance's dialect of Lark (``start: ...``)."""

    kind: Kind
    value: Any
    param: str  # the field that asked for it
    unknown: tuple[str, ...] = ()  # paths of its unknown fields
    lenient: bool = False  # what the grammar cannot hold of a schema is left to the model


def grammar_of(wanted: OutputFormat) -> bytes:
    """Return the grammar for llguidance, not compiled yet. Raises InvalidRequest."""
    try:
        return _grammar_of(wanted).encode()
    except ValueError as error:
        raise WrongField(wanted.param, error) from error


def _grammar_of(wanted: OutputFormat) -> str:
    text: str
    match wanted.kind:
        case "json":
            schema = guided(orjson.loads(wanted.value), lenient=wanted.lenient)
            text = LLMatcher.grammar_from_json_schema(schema)
        case "regex":
            text = LLMatcher.grammar_from_regex(wanted.value)
        case "choice":
            text = LLMatcher.grammar_from_lark(
                "start: " + " | ".join(orjson.dumps(choice).decode() for choice in wanted.value)
            )
        case "grammar":
            text = LLMatcher.grammar_from_lark(_as_lark(wanted.value))
    return text


def _as_lark(text: str) -> str:
    """Raises ValueError."""
    if not EBNF_RULE.search(text):
        return text
    if len(text) > MAX_EBNF_CHARS:
        raise ValueError(f"is longer than {MAX_EBNF_CHARS} characters, which EBNF and GBNF may have")
    try:
        return gbnf_to_lark(text)
    except (Exception, RecursionError) as error:  # the library's own are plain ones
        raise ValueError(f"the grammar cannot be read: {error}") from error


def check_response_format(value: Any) -> OutputFormat | None:
    """Return the format of ``response_format``. Raises PydanticCustomError.

    Beside OpenAI's forms a bare schema is taken, as llama.cpp, Together and Fireworks do.
    """
    if value is None or value == "text":
        return None
    given = value if isinstance(value, dict) else {"type": value}
    kind, param = given.get("type"), "response_format"
    unknown = _unknown_within(given, ("type", "json_schema", "schema", "grammar"), param)
    match kind:
        case "text":
            return None
        case "json_object" if given.get("schema") is None:
            return OutputFormat("json", '{"type":"object"}', param, unknown)
        case "json_object":
            return _json(given["schema"], param)._replace(unknown=unknown, lenient=True)
        case "grammar":
            return _CHECKS["grammar"](given.get("grammar"), param)._replace(unknown=unknown)
        case "json_schema":
            return _json_schema(given, unknown)
        case "structural_tag":
            return _structural_tag(given, param)
    known = "'text', 'json_object', 'json_schema' or 'structural_tag'"
    raise invalid(f"type {kind!r} is not known; use {known}")


def _structural_tag(given: Any, param: str) -> OutputFormat:
    if isinstance(given, str):
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError as error:
            raise invalid(f"the structural tag is not valid JSON: {error}") from error
    match given:
        case {"format": dict()} | {"structures": [_, *_], "triggers": [_, *_]}:
            _bounded(_dumped(given))
            names = ("type", "format") if "format" in given else ("type", "structures", "triggers")
            return OutputFormat("structural_tag", given, param, _unknown_within(given, names, param))
    raise invalid("a structural tag needs `format`, or `structures` and `triggers`")


def _json_schema(given: dict[str, Any], unknown: tuple[str, ...]) -> OutputFormat:
    param, outer = "response_format", given.get("json_schema", given)
    bare = outer is not given and isinstance(outer, dict) and bool(BARE & outer.keys())
    if not isinstance(outer, dict) or ("schema" not in outer and not bare):
        raise invalid('type \'json_schema\' needs {"json_schema": {"name": "...", "schema": {...}}}')
    if "schema" not in outer or outer is given:
        return _json(outer.get("schema", outer), param)._replace(unknown=unknown, lenient=True)
    known = ("name", "description", "schema", "strict")
    unknown += _unknown_within(outer, known, f"{param}.json_schema")
    found = _json(outer["schema"], param)._replace(unknown=unknown, lenient=outer.get("strict") is not True)
    if not found.lenient and (fault := strict_fault(orjson.loads(found.value))):
        raise invalid(f"the schema cannot be strict: {fault}")
    return found


def _unknown_within(value: Any, known: Collection[str], path: str) -> tuple[str, ...]:
    return tuple(f"{path}.{name}" for name in value if name not in known) if isinstance(value, dict) else ()


def check_structured_outputs(value: Any) -> OutputFormat | None:
    """Return the format of ``structured_outputs``: an object with one of KINDS, or ``json_object``."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise invalid("must be an object")
    given = {key: inner for key, inner in value.items() if inner is not None and inner is not False}
    if len(given) != 1 or next(iter(given)) not in (*KINDS, "json_object"):
        raise invalid(f"must have exactly one of {', '.join(KINDS)} and json_object")
    ((key, inner),) = given.items()
    if key == "json_object":
        return OutputFormat("json", '{"type":"object"}', "structured_outputs")
    return _CHECKS[key](inner, "structured_outputs")


def check_named(name: str) -> Any:
    """Return the check of one of NAMED_KINDS' fields."""
    return lambda value: None if value is None else _CHECKS[NAMED_KINDS[name]](value, name)


def _json(schema: Any, param: str) -> OutputFormat:
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise invalid(f"the schema is not valid JSON: {error}") from error
    if schema is True:
        schema = {}  # whatever is JSON; llguidance takes objects only
    if not isinstance(schema, dict):
        raise invalid("the schema allows nothing" if schema is False else "the schema must be an object")
    return OutputFormat("json", _bounded(_dumped(schema)), param)


def _dumped(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise invalid(f"it cannot be read: {error}") from error


def _text(kind: Literal["regex", "grammar"]) -> Any:
    def check(value: Any, param: str) -> OutputFormat:
        if not isinstance(value, str) or not value:
            raise invalid("must be a string that is not empty")
        return OutputFormat(kind, _bounded(value), param)

    return check


def _choice(value: Any, param: str) -> OutputFormat:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(choice, str) and choice for choice in value)
    ):
        raise invalid("must be a list of strings that are not empty")
    if len(value) > MAX_CHOICES:
        raise invalid(f"has {len(value)} entries; at most {MAX_CHOICES} are allowed")
    _bounded("".join(value))
    return OutputFormat("choice", value, param)


_CHECKS: dict[str, Callable[[Any, str], OutputFormat]] = {
    "json": _json,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("grammar"),
    "structural_tag": _structural_tag,
}


def _bounded(text: str) -> str:
    if len(text.encode(errors="replace")) > MAX_CHARS:
        raise invalid(f"is longer than {MAX_CHARS} bytes")
    return text


_OBJECT: dict[str, Any] = {"type": "object"}
_STRINGS: dict[str, Any] = {"type": "array", "items": STRING, "minItems": 1, "maxItems": MAX_CHOICES}


def object_with(needed: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the schema of an object that has these properties. ``more``: its further keywords."""
    return {"type": "object", "required": [*needed], "properties": needed, **more}


def _typed(name: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    return object_with({"type": {"const": name}, **(more or {})})


_NAME = {"type": "string"}
_JSON_SCHEMA = {**_OBJECT, "required": ["schema"], "properties": {"name": _NAME, "schema": _OBJECT}}
_TAGGED = _typed("structural_tag", {"format": _OBJECT})
_SCHEMA = _typed("json_schema", {"json_schema": _JSON_SCHEMA})
RESPONSE_FORMAT = WithJsonSchema({"anyOf": [_typed("text"), _typed("json_object"), _SCHEMA, _TAGGED, NULL]})
_ONE_OF = {
    "json": _OBJECT,
    "regex": STRING,
    "choice": _STRINGS,
    "grammar": STRING,
    "structural_tag": {"anyOf": [_OBJECT, STRING]},
    "json_object": {"const": True},
}
NAMED = {key: WithJsonSchema({"anyOf": [kind, NULL]}) for key, kind in _ONE_OF.items()}
_ONLY = [object_with({key: kind}, additionalProperties=False) for key, kind in _ONE_OF.items()]
STRUCTURED_OUTPUTS = WithJsonSchema({"anyOf": [*_ONLY, NULL]})
