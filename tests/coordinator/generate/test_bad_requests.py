"""Whatever comes in, the answer is OpenAI's error JSON with the right status: 400 for bad values, never 422,
never 500."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.bad_values import CHAT, TEXT, error_of
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.server import HttpServer

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b"[" * 5000,
        b'{"prompt": "\\ud800"}',
    ],
)
async def test_bodies_that_are_no_json_objects(http: httpx.AsyncClient, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = await http.post(path, content=body, headers=JSON)
        assert response.status_code == 400
        error_of(response)


async def test_routes_models_and_methods(http: httpx.AsyncClient) -> None:
    for path in ("/v1", "/v1/nothing", "/doc"):
        response = await http.get(path)
        assert response.status_code == 404
        error_of(response)
    for path, body in (
        ("/v1/completions", TEXT),
        ("/v1/chat/completions", CHAT),
        ("/tokenize", {"prompt": "a"}),
    ):
        response = await http.post(path, json={**body, "model": "huge"})
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"
        response = await http.get(path)
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        error_of(response)
    assert (await http.post("/v1/models")).status_code == 405


async def test_a_body_beyond_the_limit_is_413(http: httpx.AsyncClient) -> None:
    async def chunks() -> Any:
        for _ in range(40):
            yield b"x" * 65536

    for path in ("/v1/completions", "/tokenize"):
        for content in (b"x" * (1 << 20 | 1), chunks()):
            response = await http.post(path, content=content, headers=JSON)
            assert response.status_code == 413
            assert str(1 << 20) in error_of(response)["message"]
    assert (
        await http.post(
            "/v1/completions", json={**TEXT, "prompt": [5] * 10, "user": None, "x": "y" * 900_000}
        )
    ).status_code == 200


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/chat/completions/"])
async def test_a_wrong_base_url_is_told_the_right_path(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, json={})
    assert answer.status_code == 404
    asked = path.rstrip("/")
    assert answer.json()["error"]["message"] == f"There is no POST {asked}: use /v1/chat/completions."


async def test_nulls_and_unknown_fields_are_accepted(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    names = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "max_tokens",
        "seed",
        "logit_bias",
        "stream",
        "stream_options",
        "user",
        "logprobs",
    ]
    nulls = dict.fromkeys([*names, "presence_penalty", "frequency_penalty"])
    unknown = {"frobnicate": 1, "turbo": True}
    with caplog.at_level(logging.INFO, "splitserve.coordinator"):
        assert (
            await http.post("/v1/completions", json={**TEXT, **nulls, "best_of": None, **unknown})
        ).status_code == 200
        assert (
            await http.post("/v1/chat/completions", json={**CHAT, **nulls, "tools": None, **unknown})
        ).status_code == 200
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["ignored unknown fields of a request: 'frobnicate', 'turbo'"]  # once, not twice


async def test_unknown_fields_are_named_with_their_path(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Not those that have no value: clients send back all fields of an answer's message."""
    function = {"name": "f", "arguments": "{}", "thought": 1}
    call = {"id": "c", "type": "function", "function": function, "index": 0}
    called = {"role": "assistant", "tool_calls": [call], "audio": None}
    messages = [{"role": "user", "content": "Hi", "mood": "good"}, called, *CHAT["messages"]]
    tool = {"type": "function", "function": {"name": "f", "cost": 1}, "free": True}
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"title": "no field of ours"}, "loose": 1},
        "indent": 2,
    }
    body = {
        **CHAT,
        "messages": messages,
        "tools": [tool],
        "stream": True,
        "stream_options": {"pace": 1},
        "frobnicate": 1,
        "audio": None,
    }
    body["response_format"] = schema
    paths = [
        "messages[0].mood",
        "messages[1].tool_calls[0].index",
        "messages[1].tool_calls[0].function.thought",
    ]
    with caplog.at_level(logging.INFO, "splitserve.coordinator"):
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await http.post("/tokenize", json={"messages": messages[:1]})).status_code == 200
    formats = ["response_format.indent", "response_format.json_schema.loose"]
    paths = ["frobnicate", *paths, "stream_options.pace", "tools[0].free", "tools[0].function.cost", *formats]
    lines = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert lines == [", ".join(map(repr, paths)), "'messages[0].mood'"]


async def test_no_worker_is_503_at_once(http: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.workers = False
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", {**CHAT, "stream": True})):
        response = await http.post(path, json=body)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        error_of(response)
    assert not dispatcher.requests, "nobody was waited for"
    dispatcher.workers = True
    assert (await http.post("/v1/completions", json=TEXT)).status_code == 200


async def test_a_prompt_without_template_or_that_it_refuses(http: httpx.AsyncClient) -> None:
    response = await http.post(
        "/v1/chat/completions", json={**CHAT, "messages": [{"role": "tool", "content": "x"}]}
    )
    assert "no tools here" in error_of(response)["message"]


async def test_headers_without_end_are_refused(server: HttpServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n")
    with contextlib.suppress(ConnectionError):  # the answer may be lost where much was left unread
        assert (await reader.readline()).startswith(b"HTTP/1.1 431")
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [
    *(
        "prompt",
        "messages",
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "best_of",
        "stop",
        "stop_token_ids",
        "logit_bias",
    ),
    *(
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "logprobs",
        "top_logprobs",
        "echo",
        "suffix",
        "stream_options",
    ),
    *(
        "ignore_eos",
        "tools",
        "tool_choice",
        "response_format",
        "user",
        "priority",
        "chat_template_kwargs",
        "presence_penalty",
    ),
    *(
        "frequency_penalty",
        "repetition_penalty",
        "something_else",
        "structured_outputs",
        "guided_json",
        "guided_choice",
    ),
]
bodies = st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4)


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    body=bodies,
    raw=st.booleans(),
    data=st.data(),
)
def test_random_bodies_never_break_the_server(
    fuzzed: Any, path: str, body: dict[str, Any], raw: bool, data: st.DataObject
) -> None:
    content = json.dumps({**(TEXT if "chat" not in path else CHAT), **body}).encode()
    if raw:
        cut = data.draw(st.integers(0, len(content)))
        content = (
            content[:cut] + data.draw(st.binary(max_size=3)) + content[cut + data.draw(st.integers(0, 3)) :]
        )
    response = fuzzed.post(path, content=content, headers=JSON)
    if response.status_code != 200:
        assert 400 <= response.status_code < 500
        assert response.status_code != 422
        error_of(response)
