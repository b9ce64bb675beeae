"""Arguments written as plain text get the types of the tool's schema."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from coordinator.chat_output.families import WRITERS, calls_in

from splitserve.coordinator.chat_output.call_formats import FORMATS, ToolStyle
from splitserve.coordinator.chat_output.events import joined
from splitserve.coordinator.chat_output.style import ChatStyle
from splitserve.coordinator.errors import InvalidRequest
from splitserve.coordinator.generate.parameter_grammar import parameter_rules


@pytest.mark.parametrize("style", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"])
@pytest.mark.parametrize(
    ("written", "schema", "read"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "number"}, 5),
        ("5.0", {"type": "integer"}, 5.0),
        ("five", {"type": "integer"}, "five"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("None", {"type": ["string", "null"]}, None),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 5),
        ("null", {"type": "string"}, "null"),
        ("{'a': (1, 'it\\'s \"x\"'), 'b': True}", {"type": "object"}, {"a": [1, 'it\'s "x"'], "b": True}),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ('["x"]', {"type": "array"}, ["x"]),
        ("7", {"enum": [7, 8]}, 7),
        ("7", {"$ref": "#/$defs/zip"}, "7"),
        ("7", {}, 7),
        ("seven", {}, "seven"),
        ("", {"type": "string"}, ""),
    ],
)
def test_arguments_are_typed_by_the_schema(
    style: ToolStyle, written: str, schema: dict[str, Any], read: Any
) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"zip": {"type": "string"}}}
    parser = ChatStyle(style).parser({"f": parameters}, "")
    events = joined([*parser.feed(WRITERS[style]([("f", {"a": written})])), *parser.finish()])
    assert calls_in(events) == [("f", {"a": read})]


@pytest.mark.parametrize("style", ["qwen3_coder", "glm45", "deepseek_v32", "minimax_m2", "seed_oss"])
def test_a_schema_that_is_a_reference_as_a_whole(style: ToolStyle) -> None:
    """So pydantic writes a model that has itself as a field."""
    node = {"type": "object", "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}}}
    parameters: dict[str, Any] = {"$ref": "#/$defs/Node", "$defs": {"Node": node}}
    arguments = {"name": "5", "next": {"name": "x"}}
    parser = ChatStyle(style).parser({"f": parameters}, "")
    written = WRITERS[style]([("f", arguments)])
    assert calls_in(joined([*parser.feed(written), *parser.finish()])) == [("f", arguments)]
    rules = "\n".join(parameter_rules(FORMATS[style], 0, parameters, json.dumps, lenient=True))
    assert "p_0_1" in rules  # its second property


ITSELF = {"$ref": "#/properties/a"}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [ITSELF] * 9},
        {"type": "string", "anyOf": [ITSELF] * 9},
        {"type": "string", "oneOf": [{"pattern": "a"}, True, {"$ref": "#/nowhere"}]},
        {"type": "string", "enum": 5},
        {"anyOf": 5},
        {"type": "string", "pattern": "[" * 50_000},
    ],
    ids=["union of itself", "text of itself", "odd options", "odd values", "odd union", "classes"],
)
def test_odd_schemas_end_and_raise_nothing_else(schema: dict[str, Any]) -> None:
    """The first held up the coordinator for good, others were answered with 500."""
    for parameters in ({"properties": {"a": schema}}, {"$ref": "#/a", "a": 5}):
        for lenient in (True, False):
            with suppress(InvalidRequest):
                assert list(parameter_rules(FORMATS["glm45"], 0, parameters, json.dumps, lenient=lenient))
    parser = ChatStyle("glm45").parser({"f": {"properties": {"a": schema}}}, "")
    events = joined([*parser.feed(WRITERS["glm45"]([("f", {"a": "x"})])), *parser.finish()])
    assert calls_in(events) == [("f", {"a": "x"})]
