"""Every way to ask for structured output reaches the workers as a grammar; what is none is a 400 with the
reason."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.text.served_model import ServedModel

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def follows(grammar: bytes, text: str, model: ServedModel) -> bool:
    """Whether the text is a whole output under the grammar."""
    tokenizer = LLTokenizer(model.tokenizer.fast.to_str(), n_vocab=model.vocab_size, eos_token=[1])
    matcher = LLMatcher(tokenizer, grammar.decode(), log_level=0)
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"response_format": {"type": "json_object"}},
            ['{"x": [1]}', "{}"],
            ["[]", "5", "{" + "\n" * 40 + "}"],
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            ['{"a": 7}'],
            ["{}", '{"a": "7"}'],
        ),
        ({"structured_outputs": {"json": SCHEMA}}, ['{"a":7}'], ["{}"]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["5"]),
        ({"structured_outputs": {"grammar": 'start: "a" start "b" |'}}, ["ab", "aabb", ""], ["aab"]),
        ({"guided_json": '{"enum": [1, "é"]}'}, ["1", '"é"'], ["2"]),
        ({"guided_json": True}, ["1", "{}"], ["x"]),
        ({"guided_regex": "[ab]{2}"}, ["ab"], ["a", "abc"]),
        ({"guided_choice": ['a "b"\n', "c|d", "世界"]}, ['a "b"\n', "c|d", "世界"], ["c", "a"]),
        ({"guided_grammar": "start: /[0-9]+/"}, ["42"], ["x"]),
    ],
)
async def test_each_way_becomes_a_grammar(
    http: httpx.AsyncClient,
    dispatcher: FakeDispatcher,
    model: ServedModel,
    fields: dict[str, Any],
    good: list[str],
    bad: list[str],
) -> None:
    for path, base in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi"})):
        response = await http.post(path, json={**base, **fields})
        assert response.status_code == 200, response.text
        grammar = dispatcher.requests[-1].sampling.grammar
        assert [follows(grammar, text, model) for text in good] == [True] * len(good)
        assert [follows(grammar, text, model) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}]
)
async def test_no_grammar_where_none_is_asked_for(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, fields: dict[str, Any]
) -> None:
    assert (await http.post("/v1/chat/completions", json={**CHAT, **fields})).status_code == 200
    assert dispatcher.requests[-1].sampling.grammar == b""


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "objec"}},
                }
            },
            "objec",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"not": {}}, "strict": True},
                }
            },
            "not",
        ),
        ({"guided_json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"guided_json": {"$ref": "#"}}, "no text satisfies it"),
        ({"guided_json": "{"}, "not valid JSON"),
        ({"guided_json": False}, "allows nothing"),
        ({"guided_regex": "(a"}, "guided_regex: the regular expression cannot be read: unclosed group"),
        (
            {"guided_regex": "\\bx"},
            "guided_regex: the regular expression cannot be followed: lookarounds not supported yet",
        ),
        (
            {"guided_json": {"type": "string", "pattern": "(a["}},
            "guided_json: the regular expression cannot be read: unclosed char",
        ),
        ({"guided_grammar": "start: nothing"}, "nothing"),
        (
            {
                "guided_json": {
                    "allOf": [
                        {"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(10)]} for i in range(12)
                    ]
                }
            },
            "too large",
        ),
        ({"guided_regex": "a" * 100_001}, "longer than"),
    ],
)
async def test_what_is_no_grammar_is_a_400_with_the_reason(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, fields: dict[str, Any], reason: str
) -> None:
    for stream in (False, True):
        response = await http.post("/v1/chat/completions", json={**CHAT, **fields, "stream": stream})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == next(iter(fields))
        assert reason in error["message"]
        assert "start:" not in error["message"] or "guided_grammar" in fields, (
            "the grammar that was made of it is nobody's"
        )
    assert not dispatcher.requests


@pytest.mark.parametrize(
    ("wanted", "status"),
    [
        ({"json": {"type": "integer", "multipleOf": 49_999}}, 400),
        ({"json": {"type": "number", "multipleOf": 4.9999}}, 400),
        ({"json": {"type": "integer", "allOf": [{"multipleOf": 197}, {"multipleOf": 211}]}}, 400),
        ({"grammar": 'start: %json {"type": "integer", "multipleOf": 49999}'}, 400),
        ({"grammar": 'start: %json {"type": "integer", "\\u006dultipleOf":\n49999}'}, 400),
        ({"json": {"type": "integer", "multipleOf": 86_400}}, 200),
        ({"json": {"type": "number", "multipleOf": 0.25}}, 200),
    ],
)
@pytest.mark.timeout(60)
async def test_a_divisor_costs_no_more_than_a_second(
    http: httpx.AsyncClient, wanted: dict[str, Any], status: int
) -> None:
    """Time and memory grow with its square: a prime of six digits takes half a minute, on every worker."""
    answer = await http.post("/v1/chat/completions", json={**CHAT, "structured_outputs": wanted})
    assert answer.status_code == status, answer.text
