"""Calls that Gemma 4 is made to write: held to the tool's schema, values within values too."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from coordinator.chat_output.families import WRITERS
from coordinator.chat_output.test_forced_calls import arguments_drawn, forced
from coordinator.http.test_calls_at_will import followers, with_marks
from jsonschema import validate

from splitserve.coordinator.chat_output.style import ChatStyle
from splitserve.coordinator.errors import InvalidRequest
from splitserve.coordinator.generate.gemma_grammar import gemma_rules
from splitserve.coordinator.text.served_model import ServedModel

STYLE = ChatStyle("gemma4", "gemma4")
QUOTE = '<|"|>'


def of(schema: Any) -> dict[str, Any]:
    return {"properties": {"a": schema}}


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "who": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]{1,4}$"},
                "age": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 99}, {"type": "null"}]},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"enum": ["a", "b,]}"]}, "minItems": 1, "maxItems": 3},
        "none": {"type": "array", "items": {"type": "string"}, "maxItems": 0},
        "pick": {"enum": ["x", 2, None, {"a": [True, "y"]}]},
        "either": {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "array", "items": {"const": 0}}]},
        "tree": {"$ref": "#/$defs/Tree"},
        "mixed": {"type": ["number", "string", "boolean"], "minimum": 0, "maxLength": 1},
    },
    "required": ["who", "tags", "none", "pick", "either", "tree", "mixed"],
    "additionalProperties": False,
    "$defs": {
        "Tree": {
            "type": "object",
            "properties": {
                "leaf": {"type": "boolean"},
                "next": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]},
            },
            "required": ["leaf", "next"],
            "additionalProperties": False,
        }
    },
}  # fmt: skip
RIGHT: dict[str, Any] = {
    "who": {"name": "bo", "age": 7},
    "tags": ["a", "b,]}"],
    "none": [],
    "pick": {"a": [True, "y"]},
    "either": [0, 0],
    "tree": {"leaf": False, "next": {"leaf": True, "next": None}},
    "mixed": 2.5,
}
WRONG: list[dict[str, Any]] = [
    {"who": {"name": "bo"}},
    {"who": {"name": "B", "age": None}},
    {"who": {"name": "bo", "age": 100}},
    {"who": {"name": "bo", "age": 7, "x": 1}},
    {"tags": []},
    {"tags": ["a"] * 4},
    {"tags": ["b"]},
    {"none": ["x"]},
    {"pick": {"a": [True]}},
    {"pick": 3},
    {"either": "abc"},
    {"either": [1]},
    {"tree": {"leaf": False, "next": {"leaf": 1, "next": None}}},
    {"tree": None},
    {"mixed": "ab"},
    {"mixed": -1},
    {"mixed": None},
]


@pytest.mark.parametrize("special", [False, True])
def test_values_within_values_are_held_to_the_schema(model: ServedModel, special: bool) -> None:
    for arguments in arguments_drawn(model, "gemma4", NESTED, special=special):
        validate(arguments, NESTED)
    served = with_marks(model, STYLE, special)
    function = {"name": "note", "parameters": NESTED, "strict": True}
    grammar = forced(served, tools=[{"type": "function", "function": function}], tool_choice="required")
    right = [
        {**RIGHT, "mixed": "z", "pick": None, "either": "ab"},
        {**RIGHT, "pick": 2, "mixed": True},
        RIGHT,
    ]
    wrong = [{**RIGHT, **each} for each in WRONG]
    texts = [WRITERS["gemma4"]([("note", each)]) for each in [*right, *wrong]]
    assert followers(grammar, texts, served) == texts[: len(right)]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "object"}, [{}, {"a": [1, {"b": "c"}], "d": None}, {"a-b": "}"}], []),
        ({"properties": {}}, [{}], [{"a": 1}]),
        (
            {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            [{}, {"a": 1}, {"b": "c"}, {"a": 1, "b": "c", "d": "e"}],
            [{"a": "x"}, {"b": 1}, {"a": 1, "b": 1}],
        ),
        (
            {"properties": {"a": {}, "b": {"minimum": 3}, "c": {"items": {}}}, "required": ["b"]},
            [{"b": 3}, {"a": {"x": [[]]}, "b": 3, "c": ["x", 1]}, {"b": 4, "c": []}],
            [{"a": 1}, {"b": 2}, {"b": 3, "d": 1}, {"b": 3, "a": 1}],
        ),
        (
            {
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            [{"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}],
            [{}, {"a": "x", "b": "x"}],
        ),
        (of({"type": "array", "maxItems": 1}), [{"a": []}, {"a": [1]}], [{"a": [1, 1]}]),
        (of({"items": {}, "minItems": 2}), [{"a": [1] * 2}, {"a": ["b"] * 5}], [{"a": []}, {"a": [1]}]),
        (of({"prefixItems": [{}], "items": {"type": "null"}}), [{"a": ["x", None]}], [{"a": 1}]),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"b": {"$ref": "#/$defs/A"}}}}},
            [{"b": {"b": {}}}],
            [{"b": 1}],
        ),
        ({"additionalProperties": False}, [{}], [{"a": 1}]),
        (of({"properties": {}, "required": ["b"]}), [{"a": {"b": 1}}], [{"a": {}}, {"a": {"c": 1}}]),
        ({"properties": {"a": {}}, "if": {"required": ["a"]}}, [{"a": 1, "b": 2}, {"b": 1}], []),
        (
            {
                "properties": {"a": {"type": "integer"}, "b": {}},
                "required": ["a"],
                "anyOf": [{"properties": {"c": {"type": "null"}}, "required": ["b"]}],
            },
            [{"a": 1, "b": 2, "c": None}, {"a": 1, "b": 2}],
            [{"b": 1}, {"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": "x", "b": 2}],
        ),
        (of({"type": ["string", "array"], "enum": ["a", 1, [2]]}), [{"a": "a"}, {"a": [2]}], [{"a": 1}]),
    ],
    ids=[
        *("any", "none", "others", "untyped", "union", "one", "two", "prefix", "reference", "closed"),
        *("required", "if", "both", "values"),
    ],
)  # fmt: skip
def test_tools_that_are_not_strict(
    model: ServedModel, schema: dict[str, Any], right: list[dict[str, Any]], wrong: list[dict[str, Any]]
) -> None:
    served = with_marks(model, STYLE, special=True)
    function = {"name": "note", "parameters": schema}
    grammar = forced(served, tools=[{"type": "function", "function": function}], tool_choice="required")
    texts = [WRITERS["gemma4"]([("note", each)]) for each in [*right, *wrong]]
    assert followers(grammar, texts, served) == texts[: len(right)]
    for each in right:
        validate(each, schema)


def test_a_thought_may_come_before_a_call_that_is_forced(model: ServedModel) -> None:
    served = with_marks(model, STYLE, special=True)
    call = WRITERS["gemma4"]([("now", {})])
    texts = [f"<|channel>thought\nHm.<channel|>{call}", call, "<|channel>thought\n<channel|>Yes."]
    assert followers(forced(served, tool_choice="required"), texts, served) == texts[:2]


ITSELF = {"$ref": "#/properties/a"}
DEEP: Any = {"type": "object"}
for _ in range(100):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("schema", "strict", "reason"),
    [
        ({"properties": {"a:b": {}}}, False, "property name 'a:b'"),
        (of({"enum": [{" ": 1}]}), False, "property name ' '"),
        (DEEP, False, "so deep a schema"),
        (of({"const": DEEP}), False, "so deep a schema"),
        (of({"type": ["string", "null"], "anyOf": [ITSELF] * 9}), False, "so large or so deep a schema"),
        (of({"type": "array", "uniqueItems": True}), True, "strict schema to `uniqueItems`"),
        (of({"allOf": [{}]}), True, "strict schema to `allOf`"),
        (of({"type": "string", "format": "uri"}), True, "strict schema to `format`"),
        (of({"minLength": 1, "anyOf": [{"type": "string"}, {"type": "null"}]}), True, "`anyOf`"),
        (of({"$ref": "#", "minLength": 1}), True, "strict schema to `$ref`"),
        (of({"enum": [None, "a"], "pattern": "b"}), True, "strict schema to `pattern`"),
        (of({"enum": [[1]], "type": "object"}), True, "strict schema to `enum`"),
        (of(False), True, "strict schema to `false`"),
        (of({"type": ["array", "null"], "enum": []}), True, "strict schema to `enum`"),
    ],
)  # fmt: skip
def test_what_the_form_cannot_hold_is_refused(schema: dict[str, Any], strict: bool, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)):
        list(gemma_rules(QUOTE, 0, schema, json.dumps, lenient=not strict))
    if strict:
        assert list(gemma_rules(QUOTE, 0, schema, json.dumps, lenient=True))
