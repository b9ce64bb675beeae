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
from support.http_fakes import MAX_MODEL_LEN, FakeDispatcher

from splitserve.coordinator.server import HttpServer
from splitserve.coordinator.text.served_model import ServedModel

JSON = {"content-type": "application/json"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "tiny", "prompt": "Hi"}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, after a look at its shape."""
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


TOOL = {"type": "function", "function": {"name": "a"}}
BAD_FOR_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": -(1 << 63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 33}, "stop"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"user": 5}, "user"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"return_token_ids": "yes"}, "return_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"prompt_cache_key": 5}, "prompt_cache_key"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"guided_grammar": ["a"]}, "guided_grammar"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_regex": "a", "min_tokens": 1}, "min_tokens"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
]
BAD_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [[True]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [512]}, "prompt"),
    ({"prompt": [1 << 70]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a"] * 2049}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 100}, "n"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"echo": "yes"}, "echo"),
]
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": 5}, "tools"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "b"}}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": "required", "tools": [TOOL], "ignore_eos": True}, "ignore_eos"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]
CASES = [
    *(("/v1/completions", {**TEXT, **bad}, param) for bad, param in BAD_FOR_BOTH + BAD_TEXT),
    *(("/v1/chat/completions", {**CHAT, **bad}, param) for bad, param in BAD_FOR_BOTH + BAD_CHAT),
]


async def test_bad_values_are_400_and_name_the_field(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    for path, body, param in CASES:
        response = await http.post(path, json=body)
        assert response.status_code == 400, (body, response.text)
        error = error_of(response)
        assert param.split("[")[0].split(".")[0] in error["message"], (body, error)
        assert error["param"] == param, (body, error)
        assert error["type"] == "invalid_request_error"
        streamed = await http.post(path, json={"stream": True, **body})
        assert streamed.status_code == (400 if param != "stream_options" else 200), (body, streamed.text)
    assert all(request.request_id.startswith("c") for request in dispatcher.requests)


async def test_logit_bias_names_every_bad_key_and_the_vocabulary(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={**TEXT, "logit_bias": {"600": 1, "5": 1, "700": 1}})
    message = error_of(response)["message"]
    assert all(part in message for part in ("600", "700", "512"))
    response = await http.post("/v1/completions", json={**TEXT, "logit_bias": {"x": 1, "y": 1}})
    assert all(part in error_of(response)["message"] for part in ("'x'", "'y'"))


async def test_too_long_names_both_numbers(http: httpx.AsyncClient, model: ServedModel) -> None:
    prompt = [5] * 2000
    for max_tokens, path, body in (
        (49, "/v1/completions", {**TEXT, "prompt": prompt}),
        (2048, "/v1/chat/completions", CHAT),
    ):
        error = error_of(await http.post(path, json={**body, "max_tokens": max_tokens}))
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
        assert str(max_tokens) in error["message"]
        assert ("2000" if body is not CHAT else "5") in error["message"]
    error = error_of(await http.post("/v1/completions", json={**TEXT, "max_tokens": 10**9}))
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
    error = error_of(await http.post("/v1/completions", json={**TEXT, "prompt": [5] * 2048}))
    assert "2048" in error["message"]
    assert (
        await http.post("/v1/completions", json={**TEXT, "prompt": [5] * 2040})
    ).status_code == 200  # the default is cut


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
    paths = ["frobnicate", "stream_options.pace", *formats, *paths, "tools[0].free", "tools[0].function.cost"]
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
