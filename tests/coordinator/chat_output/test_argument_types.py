"""Arguments written as plain text get the types of the tool's schema."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator.chat_output.families import WRITERS, calls_in

from splitserve.coordinator.chat_output.call_formats import ToolStyle
from splitserve.coordinator.chat_output.events import joined
from splitserve.coordinator.chat_output.style import ChatStyle


@pytest.mark.parametrize("style", ["qwen3_coder", "glm45"])
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
