"""Arguments that a model wrote as plain text or as Python's literals, as JSON text."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_REFS = 16
_KIND_OF = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array",
    type(None): "null",
}  # fmt: skip
_PYTHON = re.compile(
    r"""(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<key>[A-Za-z_][\w.-]*)\s*=|(?P<word>[A-Za-z]+)"""
    r"""|(?P<other>[-+.\d]+(?:[eE][-+]?\d+)?|[][{},:()\s])""",
    re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def resolved(schema: Any, root: Any) -> Any:
    """Return the schema to which its ``$ref`` within ``root`` leads, or the schema itself."""
    for _ in range(MAX_REFS):
        if not isinstance(schema, dict) or not isinstance(ref := schema.get("$ref"), str):
            return schema
        found = root
        for part in ref.removeprefix("#").strip("/").split("/"):
            found = found.get(part) if isinstance(found, dict) else None
        schema = found
    return None


def kinds_of(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types that the schema allows; empty: any, or not known."""
    kinds, seen, options = set[str](), set[int](), [schema]
    for option in options:  # grows by those of unions; a few that name each other have no end
        option = resolved(option, root)
        if not isinstance(option, dict):
            return frozenset()
        if id(option) in seen:
            continue
        seen.add(id(option))
        kind, union = option.get("type"), option.get("anyOf", option.get("oneOf"))
        if isinstance(named := [kind] if isinstance(kind, str) else kind, list):
            kinds.update(one for one in named if isinstance(one, str))
        elif isinstance(values := option.get("enum", [option["const"]] if "const" in option else None), list):
            kinds.update(_KIND_OF[type(value)] for value in values)
        elif isinstance(union, list):
            options += union
        else:
            return frozenset()
    return frozenset(kinds)


def property_of(parameters: Any, key: str) -> Any:
    """Return the schema of one property of a tool's ``parameters``, None for an unknown one."""
    parameters = resolved(parameters, parameters)
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties.get(key) if isinstance(properties, dict) else None


def typed(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON text of a value that was written as plain text: what is none of ``kinds`` stays a
    string."""
    if kinds != {"string"} and (value := _json_of(text.strip())) is not None:
        read = json.loads(value)
        kind = "integer" if isinstance(read, float) and read.is_integer() else _KIND_OF[type(read)]
        if not kinds or kind in kinds or (kind == "integer" and "number" in kinds):
            return value
    return quoted(text)


def quoted(text: str) -> str:
    """Return the JSON string of a text."""
    return json.dumps(text, ensure_ascii=False)


def arguments_of_python(text: str) -> str | None:
    """Return the JSON object of ``key=value, ...`` as Python writes it; None if it is nothing of the kind."""
    return _json_of(f"{{{text}}}", keywords=True)


def _json_of(text: str, *, keywords: bool = False) -> str | None:
    """Return JSON as it is, and Python's literals as JSON; None for anything else."""
    if not keywords and _is_json(text):
        return text
    at, parts = 0, list[str]()
    while at < len(text):
        if (found := _PYTHON.match(text, at)) is None:
            return None
        part = _token(found, keywords)
        if part in ("]", "}") and "".join(parts[-8:]).rstrip().endswith(","):
            parts = parts[: len(parts) - parts[::-1].index(",") - 1]  # Python's comma after the last one
        parts.append(part)
        at = found.end()
    made = "".join(parts)
    return made if _is_json(made) else None


def _token(found: re.Match[str], keywords: bool) -> str:
    match found.lastgroup:
        case "string":
            return _string(found["string"])
        case "key" if keywords:
            return f"{quoted(found['key'])}: "
        case "word":
            return _WORDS.get(found["word"], "?")
        case "other":
            return found["other"].replace("(", "[").replace(")", "]")
    return "?"


def _string(literal: str) -> str:
    """Return the JSON string of Python's literal."""
    inner = re.sub(r'\\(x[0-9a-fA-F]{2}|.)|["\n\r\t]', _escape, literal[1:-1], flags=re.DOTALL)
    return f'"{inner}"'


def _escape(found: re.Match[str]) -> str:
    text, code = found[0], found[1]
    if code is None:
        return json.dumps(text)[1:-1]
    if len(code) == 3:
        return f"\\u00{code[1:]}"
    if code == "'":
        return code
    return text if code in '"\\/bfnrtu' else "\\" + text


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(name)
