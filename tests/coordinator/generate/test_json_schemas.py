"""The schemas that people send: keywords that no grammar holds, open objects, strict and bare ones."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.generate.json_schemas import strict_fault
from splitserve.coordinator.text.served_model import ServedModel

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
PATH = "/v1/chat/completions"
A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = {**A, "additionalProperties": False}
ODD: dict[str, dict[str, Any]] = {
    "set[str]": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "Decimal": {
        "anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]
    },
    "Path": {"type": "string", "format": "path"},
    "SecretStr": {"type": "string", "format": "password", "writeOnly": True},
    "IPv4Network": {"type": "string", "format": "ipv4network"},
    "zod's record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    "not": {"not": {"type": "string"}},
    "if": {"type": "object", "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
}


def tools(parameters: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    function = {"name": "f", **({} if parameters is None else {"parameters": parameters}), **more}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def formatted(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}
    }


class Texts:
    """Checks texts against the grammar of a request."""

    def __init__(self, http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel) -> None:
        self._http, self._dispatcher, self._model = http, dispatcher, model

    async def allowed(self, fields: dict[str, Any], *texts: str) -> list[str]:
        response = await self._http.post(PATH, json={**CHAT, **fields})
        assert response.status_code == 200, response.text
        tokenizer = self._model.tokenizer.fast
        compiled = LLMatcher(
            LLTokenizer(tokenizer.to_str(), n_vocab=self._model.vocab_size, eos_token=[1]),
            self._dispatcher.requests[-1].sampling.grammar.decode(),
            log_level=0,
        )
        found = []
        for text in texts:
            matcher, ids = compiled.deep_copy(), tokenizer.encode(text, add_special_tokens=False).ids
            if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
                found.append(text)
        return found


@pytest.fixture
def texts(http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel) -> Texts:
    return Texts(http, dispatcher, model)


@pytest.mark.parametrize("name", ODD)
async def test_no_keyword_fails_where_nothing_is_strict(
    http: httpx.AsyncClient, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"type": "object", "properties": {"a": ODD[name]}, "required": ["a"]}
    with caplog.at_level(logging.INFO):
        for fields in (tools(schema), formatted(schema), formatted(schema, strict=False)):
            response = await http.post(PATH, json={**CHAT, **fields})
            assert response.status_code == 200, response.text


async def test_what_is_left_to_the_model_is_named_in_the_log(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {**A, "properties": {"a": ODD["contains"], "b": {"type": "string", "pattern": "^(?!x)y$"}}}
    with caplog.at_level(logging.INFO):
        assert (await http.post(PATH, json={**CHAT, **formatted(schema)})).status_code == 200
    lines = " ".join(record.getMessage() for record in caplog.records)
    assert "contains" in lines
    assert "(?!x)y" in lines


@pytest.mark.parametrize("name", ["set[str]", "contains", "not"])
async def test_a_strict_schema_is_held_whole_or_refused(http: httpx.AsyncClient, name: str) -> None:
    schema = {**CLOSED, "properties": {"a": ODD[name]}}
    for fields in (tools(schema, strict=True), formatted(schema, strict=True), {"guided_json": schema}):
        response = await http.post(PATH, json={**CHAT, **fields})
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "Unimplemented keys" in message
        assert not any(word in message for word in ("%json", "args_0", "start:", "\n"))


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        (CLOSED, ""),
        ({}, ""),
        (A, "additionalProperties"),
        ({**CLOSED, "required": []}, "lacks a"),
        ({**CLOSED, "properties": {"a": A}}, "properties.a: a strict object"),
        ({**CLOSED, "properties": {"a": {"type": "array", "items": A}}}, "properties.a.items: a strict"),
        ({**CLOSED, "properties": {"a": {"anyOf": [A, {"type": "null"}]}}}, "anyOf.0"),
        ({**CLOSED, "$defs": {"b": A}}, "$defs.b"),
        ({**CLOSED, "properties": {"a": {"enum": [A]}}}, ""),
    ],
)
async def test_a_strict_schema_has_the_form_that_openai_asks_for(
    http: httpx.AsyncClient, schema: dict[str, Any], fault: str
) -> None:
    assert fault in strict_fault(schema)
    assert bool(fault) == bool(strict_fault(schema))
    for fields in (tools(schema, strict=True), formatted(schema, strict=True)):
        response = await http.post(PATH, json={**CHAT, **fields})
        assert response.status_code == (400 if fault else 200), response.text
        assert fault in response.text


async def test_objects_are_closed_and_in_the_order_of_their_properties(texts: Texts) -> None:
    schema = {**A, "properties": {"b": {"type": "integer"}, **A["properties"]}}
    both = ['{"b":1,"a":2}', '{"a":2}', '{"a":2,"b":1}', '{"a":2,"c":1}']
    for fields in (formatted(schema), {"guided_json": schema}):
        assert await texts.allowed(fields, *both) == both[:2]
    opened = formatted({**schema, "additionalProperties": True})
    assert await texts.allowed(opened, *both) == [both[0], both[1], both[3]]
    joined = {"allOf": [A, {"type": "object", "properties": {"b": {}}, "required": ["b"]}]}
    assert await texts.allowed(formatted(joined), '{"a":1,"b":2}') == ['{"a":1,"b":2}']
    b = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
    for joined in ({**A, "anyOf": [b]}, {**A, "oneOf": [b]}, {**A, "$ref": "#/$defs/b", "$defs": {"b": b}}):
        assert await texts.allowed(formatted(joined), '{"a":1,"b":2}', '{"a":1}') == ['{"a":1,"b":2}']


async def test_a_function_without_parameters_takes_none(texts: Texts) -> None:
    calls = [f'<tool_call>\n{{"name": "f", "arguments": {args}}}\n</tool_call>' for args in ("{}", '{"a":3}')]
    for parameters in (None, {}, {"type": "object", "properties": {}}):
        assert await texts.allowed(tools(parameters), *calls) == calls[:1]
    assert await texts.allowed(tools(None, strict=True), *calls) == calls[:1]
    assert await texts.allowed(tools({"type": "object", "additionalProperties": True}), *calls) == calls


async def test_white_space_has_at_most_two_newlines(texts: Texts) -> None:
    good = ['{"a": 1}', '{\n\t"a":\n\n 1\n}', '{"a":1\n \n }']
    bad = ['{\n\n\n"a":1}', '{"a":' + " " * 99 + "1}"]
    assert await texts.allowed(formatted(A), *good, *bad) == good
    calls = [f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>' for text in (*good, *bad)]
    assert await texts.allowed(tools(A), *calls) == calls[:3]


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object", "schema": A},
        {"type": "json_schema", "schema": A},
        {"type": "json_schema", "json_schema": A},
        {"type": "json_schema", "json_schema": {"schema": A}},
        {"type": "grammar", "grammar": 'root ::= "{\\"a\\":1}"'},
    ],
)
async def test_a_bare_schema_is_followed(texts: Texts, response_format: dict[str, Any]) -> None:
    fields = {"response_format": response_format}
    assert await texts.allowed(fields, '{"a":1}', '{"a":"b"}', json.dumps({"b": 1})) == ['{"a":1}']
