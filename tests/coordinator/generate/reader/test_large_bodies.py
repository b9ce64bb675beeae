"""Large bodies are read in a process of their own: the same answers, and nobody else waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.generate.bodies.completion import CompletionRequest
from splitserve.coordinator.generate.reader import reader_process
from splitserve.coordinator.generate.reader.reader_process import MEMBER_VALUES, num_values
from splitserve.coordinator.http.limits import LARGE_BODY_BYTES, HttpLimits
from splitserve.coordinator.server import HttpServer

TEXT: dict[str, Any] = {"prompt": "the quick brown fox", "max_tokens": 8, "temperature": 0, "seed": 1}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "naïve 世界"}],
    "max_tokens": 8,
    "temperature": 0,
    "seed": 1,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
JSON = {"content-type": "application/json"}
PADDING = {"metadata": None, "x": "y" * LARGE_BODY_BYTES}
WRONG: list[dict[str, Any]] = [
    {"prompt": 5},
    {"prompt": "a", "temperature": 9},
    {"prompt": [1, 999_999]},
    {"prompt": "a", "model": "other"},
    {"prompt": "a", "guided_regex": "("},
    {"prompt": "word " * 3000},
]


@pytest.fixture
def limits() -> HttpLimits:
    return HttpLimits()


def body_without_ids(response: httpx.Response) -> Any:
    body = response.json()
    return {name: value for name, value in body.items() if name not in ("id", "created", "usage")}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT),
        ("/v1/completions", {**TEXT, "prompt": ["one", "two"], "n": 2, "echo": True, "logprobs": 1}),
        (
            "/v1/completions",
            {**TEXT, "prompt": [[5, 6], [7]], "truncate_prompt_tokens": 1, "return_token_ids": True},
        ),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}, "stream": True}),
        ("/tokenize", {"prompt": "naïve 世界", "return_token_strs": True}),
        ("/tokenize", {"messages": CHAT["messages"]}),
        ("/detokenize", {"tokens": [50, 60, 70]}),
    ],
)
async def test_a_large_body_is_answered_as_a_small_one(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str, body: dict[str, Any]
) -> None:
    small, large = [await http.post(path, json=sent) for sent in (body, {**body, **PADDING})]
    assert (small.status_code, large.status_code) == (200, 200)
    if not body.get("stream"):
        assert body_without_ids(large) == body_without_ids(small)
    half = len(dispatcher.requests) // 2
    for one, other in zip(dispatcher.requests[:half], dispatcher.requests[half:], strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        assert one.sampling == other.sampling


@pytest.mark.parametrize("body", WRONG)
async def test_a_large_body_is_refused_as_a_small_one(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    small, large = [await http.post("/v1/completions", json=sent) for sent in (body, {**body, **PADDING})]
    assert small.status_code == large.status_code >= 400
    assert small.json() == large.json()


async def test_a_killed_reader_fails_one_request_and_is_replaced(
    http: httpx.AsyncClient, server: HttpServer
) -> None:
    assert (await http.post("/v1/completions", json={**TEXT, **PADDING})).status_code == 200
    (process,) = server.app.generation.reader._all
    os.kill(process._process.pid, signal.SIGKILL)
    refused = await http.post("/v1/completions", json={**TEXT, **PADDING})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert (await http.post("/v1/completions", json={**TEXT, **PADDING})).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"a part"])
def test_a_reader_whose_coordinator_is_killed_ends_without_a_traceback(sent: bytes) -> None:
    ours, other = socket.socketpair()
    with ours:
        ours.sendall(sent)
    with other:
        reader_process.serve(other)


@pytest.mark.parametrize("kind", ["logit_bias", "ids"])
async def test_parsing_does_not_stop_the_loop(http: httpx.AsyncClient, server: HttpServer, kind: str) -> None:
    """The longest time that the loop stands still is a small part of the parsing time. (Before: all of
    it.)"""
    if kind == "ids":
        body = b'{"prompt":[' + b"1," * 4_000_000 + b"1]}"
    else:
        body = orjson.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(700_000)}})
    begin = time.perf_counter()
    with contextlib.suppress(ValidationError):
        CompletionRequest.model_validate_json(body)
    parsing = time.perf_counter() - begin
    await http.post("/v1/completions", json={**TEXT, **PADDING})  # the process has started
    sending, longest = asyncio.create_task(send(server.port, body)), 0.0
    while not sending.done():
        begin = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - begin)
    assert b" 400 " in sending.result()
    assert longest < parsing / 3


async def send(port: int, body: bytes) -> bytes:
    """The first line of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
            b"application/json\r\ncontent-length: %d\r\n\r\n"
        )
        % len(body)
    )
    for at in range(0, len(body), 1 << 18):
        writer.write(body[at : at + (1 << 18)])
        await writer.drain()
    line = await reader.readline()
    writer.close()
    return line


async def test_a_body_of_too_many_values_is_refused(http: httpx.AsyncClient) -> None:
    refused = await http.post(
        "/v1/completions",
        headers=JSON,
        content=b'{"prompt":' + b"[" * 3 + b"1," * (1 << 20) + b"1" + b"]" * 3 + b"}",
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "request_too_large"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab",\\[]{}:é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='",\\[{x'), inner),
)


@given(values, st.integers(1, 40))
def test_values_are_counted_without_parsing(value: Any, piece: int) -> None:
    body = json.dumps(value, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_process, "SCAN_BYTES", piece)
        counted = num_values(body)
    assert counted == 1 + weight(value)


def weight(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    parts = list(value.values()) if isinstance(value, dict) else value
    members = MEMBER_VALUES * len(parts) if isinstance(value, dict) else 0
    return 1 + max(0, len(parts) - 1) + members + sum(map(weight, parts))
