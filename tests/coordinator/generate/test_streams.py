"""A stream on the wire: its silence, its usage, its names."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.generate import api, formats
from splitserve.coordinator.generate.formats import COMMENT_EVERY_S, HEADERS_AFTER_S, Silence
from splitserve.coordinator.lifecycle.request import Ended

CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
TEXT = "/v1/completions", {"prompt": "Hi", "max_tokens": 5}
BOTH = pytest.mark.parametrize(("path", "body"), [CHAT, TEXT])
NAMED = {"x-request-id": "gateway/7f:1"}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is broken after hundredths of a second."""
    monkeypatch.setattr(api, "SWEEP_EVERY_S", 0.01)
    monkeypatch.setattr(formats, "HEADERS_AFTER_S", 0.05)
    monkeypatch.setattr(formats, "COMMENT_EVERY_S", 0.05)


@BOTH
async def test_every_line_of_a_stream_that_goes_on_is_data(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    lines = (await http.post(path, json={**body, "stream": True})).text.splitlines()
    assert lines.pop(-2) == "data: [DONE]"
    assert all(orjson.loads(line.removeprefix("data: ")) for line in lines if line)


@BOTH
async def test_a_silent_stream_gets_headers_then_comments_then_its_text(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, hurried: None, path: str, body: dict[str, Any]
) -> None:
    dispatcher.hold = True
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()
        found = [await anext(lines) for _ in range(4)]
        assert [line for line in found if line] == [formats.COMMENT.decode().strip()] * 2
        dispatcher.hold = False
        rest = [line async for line in lines if line.startswith("data: ")]
    assert rest.pop() == "data: [DONE]"
    assert orjson.loads(rest[-1][6:])["choices"][0]["finish_reason"] == "length"


@BOTH
async def test_an_early_error_is_a_status_and_a_late_one_an_event(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, hurried: None, path: str, body: dict[str, Any]
) -> None:
    dispatcher.fail_after = (0, Ended(error="unavailable", message="no worker is left"))
    assert (await http.post(path, json={**body, "stream": True})).status_code == 503
    dispatcher.hold = True
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        dispatcher.hold = False
        events = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert "no worker is left" in orjson.loads(events[-1])["error"]["message"]


async def test_what_is_not_streamed_is_not_begun(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, hurried: None
) -> None:
    dispatcher.step_s = 0.05
    path, body = TEXT
    assert (await http.post(path, json=body)).json()["usage"]["completion_tokens"] == 5


def test_when_a_silence_is_broken() -> None:
    stream = Silence(100.0)
    assert not stream.headers_due(100.0 + HEADERS_AFTER_S - 0.1)
    assert stream.headers_due(100.0 + HEADERS_AFTER_S)
    due = 100.0 + COMMENT_EVERY_S
    assert not stream.comment_due(due - 1, due - 0.1, [0.0])
    assert not stream.comment_due(due - 1, due, [0.0, 105.0])  # it has written since
    assert stream.comment_due(due + 4, due + 5, [0.0, 105.0])
    assert not stream.comment_due(due + 4, due + 5, [105.0])
    assert stream.comment_due(due + 18, due + 19, [105.0])


@BOTH
async def test_usage_is_on_every_chunk_where_it_is_asked_for(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = (await http.post(path, json={**body, "stream": True, "stream_options": options})).text
    chunks = [orjson.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}


async def test_the_prompts_token_ids_are_where_vllm_has_them(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    for (path, body), of_chat in ((CHAT, True), (TEXT, False)):
        asked = {**body, "return_token_ids": True}
        whole = (await http.post(path, json=asked)).json()
        ids = list(dispatcher.requests[-1].prompt_token_ids)
        text = (await http.post(path, json={**asked, "stream": True})).text
        chunks = [orjson.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        for answer in (whole, chunks[0]):
            holder, other = (answer, answer["choices"][0]) if of_chat else (answer["choices"][0], answer)
            assert holder["prompt_token_ids"] == ids
            assert "prompt_token_ids" not in other
        assert not any("prompt_token_ids" in orjson.dumps(chunk).decode() for chunk in chunks[1:])


@BOTH
async def test_the_clients_id_is_used_and_given_back(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str, body: dict[str, Any]
) -> None:
    stem = "chatcmpl-" if "chat" in path else "cmpl-"
    for _ in range(2):  # the server's own name for it stays unique
        answer = await http.post(path, json=body, headers=NAMED)
        assert answer.headers["x-request-id"] == NAMED["x-request-id"]
        assert answer.json()["id"] == stem + NAMED["x-request-id"]
    first, second = (request.request_id for request in dispatcher.requests)
    assert first != second
    assert all(NAMED["x-request-id"] in own for own in (first, second))
    streamed = await http.post(path, json={**body, "stream": True, "request_id": "mine"}, headers=NAMED)
    assert streamed.headers["x-request-id"] == "mine"  # the body's goes before the header's
    assert f'"id":"{stem}mine"' in streamed.text
    refused = await http.post(path, json={**body, "n": 0}, headers=NAMED)
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, NAMED["x-request-id"])
    for odd in ("a b", "a" * 129, "ä", ""):
        answer = await http.post(path, json=body, headers={"x-request-id": odd.encode("latin-1")})
        assert answer.headers["x-request-id"] == answer.json()["id"]
    refused = await http.post(path, json={**body, "request_id": "a b"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")


async def test_a_slash_at_the_end_of_a_path_is_no_other_path(http: httpx.AsyncClient) -> None:
    for path, body in (CHAT, TEXT, ("/tokenize", {"prompt": "Hi"})):
        assert (await http.post(f"{path}/", json=body)).status_code == 200
    for path in ("/v1/models", "/v1/models/tiny", "/health", "/metrics", "/"):
        assert (await http.get(f"{path}/")).status_code == 200
    assert (await http.get("/metrics/", headers={"authorization": ""})).status_code == 401


@BOTH
async def test_numbers_may_come_in_strings(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str, body: dict[str, Any]
) -> None:
    strings = {"max_tokens": "4", "temperature": "0.5", "top_k": "7", "seed": "3", "ignore_eos": "true"}
    assert (await http.post(path, json={**body, **strings, "stream": "false"})).status_code == 200
    sampling = dispatcher.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (4, 0.5, 7)
    assert (sampling.seed, sampling.ignore_eos) == (3, True)
    for name, odd in (("max_tokens", "4.5"), ("temperature", "true"), ("n", "many"), ("stream", "1")):
        refused = await http.post(path, json={**body, name: odd})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), name


async def test_no_alternatives_without_log_probabilities_are_no_error(http: httpx.AsyncClient) -> None:
    path, body = CHAT
    answer = (await http.post(path, json={**body, "logprobs": False, "top_logprobs": 0})).json()
    assert answer["choices"][0]["logprobs"] is None
    assert (await http.post(path, json={**body, "logprobs": False, "top_logprobs": 1})).status_code == 400
