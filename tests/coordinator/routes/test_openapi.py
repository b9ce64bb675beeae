"""/openapi.json matches the server: its schemas accept the same bodies, and refuse those that it refuses
by kind and range."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from coordinator.generate.test_bad_values import BAD_CHAT, BAD_FOR_BOTH, BAD_TEXT
from jsonschema import Draft202012Validator
from support.bad_values import CHAT, TEXT

from splitserve.coordinator.server import HttpServer

BEYOND_A_SCHEMA = {
    *(
        "min_tokens",
        "ignore_eos",
        "guided_choice",
        "tool_choice",
        "stream_options",
        "best_of",
        "top_logprobs",
        "max_tokens",
    ),
    *("prompt", "messages", "truncate_prompt_tokens", "stop_token_ids", "logit_bias"),
}
"""Fields whose rules also depend on other fields, on the model, or on keys."""
GOOD: list[dict[str, Any]] = [
    {},
    {"stop": ["a", "b"], "logit_bias": {"7": -1.5}, "max_tokens": 3},
    {
        "stop": None,
        "n": 2,
        "seed": -5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "something_else": 1,
    },
]


async def validator_of(http: httpx.AsyncClient, path: str) -> Draft202012Validator:
    document = (await http.get("/openapi.json")).json()
    Draft202012Validator.check_schema(document["components"]["schemas"]["CompletionRequest"])
    (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
    return Draft202012Validator({**content["schema"], "components": document["components"]})


@pytest.mark.parametrize(
    ("path", "base", "bad"),
    [
        ("/v1/completions", TEXT, BAD_FOR_BOTH + BAD_TEXT),
        ("/v1/chat/completions", CHAT, BAD_FOR_BOTH + BAD_CHAT),
    ],
)
async def test_bodies_are_valid_where_the_server_takes_them(
    http: httpx.AsyncClient, path: str, base: dict[str, Any], bad: list[tuple[dict[str, Any], str]]
) -> None:
    validator = await validator_of(http, path)
    for good in GOOD:
        assert (await http.post(path, json={**base, **good})).status_code == 200
        assert list(validator.iter_errors({**base, **good})) == []
    checked = [fields for fields, _ in bad if not BEYOND_A_SCHEMA & set(fields)]
    assert len(checked) > 15
    for fields in checked:
        assert not validator.is_valid({**base, **fields}), fields


async def test_every_path_of_it_is_there(http: httpx.AsyncClient, server: HttpServer) -> None:
    document = (await http.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for method in set(methods) - {"parameters"}:
            if "{id}" in path:  # no response is stored here
                continue
            assert (await http.request(method, path.replace("{model}", "tiny"))).status_code not in (
                404,
                405,
            ), path


FORMS: list[dict[str, Any]] = [
    {"n": 2, "service_tier": "auto"},
    {"return_token_ids": True},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}},
]


@pytest.mark.parametrize(
    ("path", "name", "base", "forms"),
    [
        (
            "/v1/completions",
            "Completion",
            TEXT,
            [*FORMS, {"logprobs": 2, "echo": True, "prompt": "Hello there"}],
        ),
        ("/v1/chat/completions", "ChatCompletion", CHAT, [*FORMS, {"logprobs": True, "top_logprobs": 2}]),
    ],
    ids=["completions", "chat"],
)
async def test_answers_and_chunks_are_as_described(
    http: httpx.AsyncClient, path: str, name: str, base: dict[str, Any], forms: list[dict[str, Any]]
) -> None:
    components = (await http.get("/openapi.json")).json()["components"]
    whole, chunk = (
        Draft202012Validator({"$ref": f"#/components/schemas/{n}", "components": components})
        for n in (name, f"{name}Chunk")
    )
    for form in forms:
        body = {**base, "max_tokens": 5, **form}
        if "stream_options" not in form:
            whole.validate((await http.post(path, json=body)).json())
        lines = (await http.post(path, json={**body, "stream": True})).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert len(events) > 2
        for event in events:
            chunk.validate(event)
        assert not whole.is_valid(events[0])
