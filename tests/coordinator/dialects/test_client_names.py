"""A client's name for a call of another API holds for the chat completion behind it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.http_fakes import FakeDispatcher

NAMED = {"x-request-id": "gateway/7f:1"}
RESPONSES = "/v1/responses", {"input": "Hi"}
MESSAGES = "/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
BACKGROUND = "/v1/responses", {"input": "Hi", "background": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [RESPONSES, MESSAGES, BACKGROUND])
async def test_the_clients_id_is_used_and_given_back(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str, body: dict[str, Any], stream: bool
) -> None:
    answer = await http.post(path, json={**body, "stream": stream}, headers=NAMED)
    assert answer.headers["x-request-id"] == NAMED["x-request-id"]
    await dispatcher.until(lambda: bool(dispatcher.requests))
    assert NAMED["x-request-id"] in dispatcher.requests[0].request_id


@pytest.mark.parametrize(("path", "body"), [RESPONSES, MESSAGES])
async def test_a_refusal_has_it_too(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    for wrong in ({"temperature": 9}, {"model": "other"}):
        refused = await http.post(path, json={**body, **wrong}, headers=NAMED)
        assert refused.status_code in (400, 404)
        assert refused.headers["x-request-id"] == NAMED["x-request-id"]


async def test_anthropics_clients_find_the_id(http: httpx.AsyncClient) -> None:
    """Their errors and messages have it as ``request_id``, from a header of another name."""
    path, body = MESSAGES
    asked = [body, {**body, "stream": True}, {**body, "temperature": 9}, {"messages": 5}]
    answers = [await http.post(path, json=each, headers=NAMED) for each in asked]
    answers.append(await http.post("/v1/messages/count_tokens", json={"messages": []}, headers=NAMED))
    assert {answer.headers["request-id"] for answer in answers} == {NAMED["x-request-id"]}
    for each in asked:
        headers = (await http.post(path, json=each)).headers
        assert headers["request-id"] == headers["x-request-id"]
