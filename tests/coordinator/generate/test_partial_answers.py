"""A deadline gives back what was generated, streamed or not; a request without a token yet is a 504."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.http_fakes import ANSWER, CALL, OPERATOR, FakeDispatcher

from splitserve.coordinator.errors import InvalidRequest
from splitserve.coordinator.generate.bodies.completion import CompletionRequest
from splitserve.coordinator.generate.plan import ON_TIMEOUT_HEADER, on_timeout_of
from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.coordinator.text.served_model import ServedModel

BODY = {"prompt": "quick", "temperature": 0, "timeout": 20}
LATE = Ended(
    error="deadline", message="the request did not end within its 20 s", num_cached_tokens=3, num_dispatches=1
)


class LateDispatcher(FakeDispatcher):
    """Each choice passes its deadline after a given number of tokens."""

    after: tuple[int, ...] = (5,)

    def fails_after(self, request: Request) -> tuple[int, Ended]:
        return self.after[int(request.request_id.rpartition("-")[2])], LATE


@pytest.fixture
def dispatcher(model: ServedModel) -> LateDispatcher:
    ids = model.tokenizer.fast.encode(ANSWER, add_special_tokens=False).ids
    return LateDispatcher(lambda request: ids, step_s=0)


def text_of(model: ServedModel, num_tokens: int) -> str:
    return model.tokenizer.fast.decode(
        model.tokenizer.fast.encode(ANSWER, add_special_tokens=False).ids[:num_tokens]
    )


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert (answer.status_code, answer.text.rstrip().rpartition("\n")[2]) == (200, "data: [DONE]")
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("on_timeout", ["timeout", "length"])
async def test_the_text_so_far(http: httpx.AsyncClient, model: ServedModel, on_timeout: str) -> None:
    body = {**BODY, "on_timeout": on_timeout, "logprobs": 2}
    answer = await http.post("/v1/completions", json=body)
    (choice,), usage = answer.json()["choices"], answer.json()["usage"]
    assert answer.status_code == 200
    assert (choice["text"], choice["finish_reason"]) == (text_of(model, 5), on_timeout)
    assert len(choice["logprobs"]["tokens"]) == 5
    assert (usage["completion_tokens"], usage["splitserve"]["timed_out"]) == (5, True)
    *chunks, last = await events(http, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(model, 5)
    assert [reason for chunk in chunks if (reason := chunk["choices"][0]["finish_reason"])] == [on_timeout]
    assert (last["usage"]["completion_tokens"], last["usage"]["splitserve"]["timed_out"]) == (5, True)
    assert 'finished_reason="timeout"' in (await http.get("/metrics", headers=OPERATOR)).text


@pytest.mark.parametrize(
    ("more", "reason"),
    [({}, "length"), ({"timeout": 20}, "timeout"), ({"timeout": 20, "on_timeout": "length"}, "length")],
)
async def test_words_that_openai_has_not_are_for_requests_that_use_our_fields(
    http: httpx.AsyncClient, more: dict[str, Any], reason: str
) -> None:
    answer = await http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **more}
    )
    assert answer.json()["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("fields", "header", "effect"),
    [
        ({"on_timeout": "error"}, b"length", "error"),  # the body is nearer
        ({}, b"timeout", "timeout"),
        ({"timeout": 20}, b"", "timeout"),
        ({"timeout": 20, "on_timeout": "length"}, b"", "length"),
    ],
)
def test_how_a_request_says_so(fields: dict[str, Any], header: bytes, effect: str) -> None:
    assert on_timeout_of(CompletionRequest(prompt="x", **fields), {ON_TIMEOUT_HEADER: header}) == effect


def test_an_unknown_effect_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="x-on-timeout: 'never' is none of timeout, length, error"):
        on_timeout_of(CompletionRequest(prompt="x"), {ON_TIMEOUT_HEADER: b"never"})


@pytest.mark.parametrize("stream", [False, True])
async def test_no_token_yet_is_a_504(
    http: httpx.AsyncClient, dispatcher: LateDispatcher, stream: bool
) -> None:
    dispatcher.after = (0, 0)
    for more in ({}, {"n": 2}):
        answer = await http.post("/v1/completions", json={**BODY, **more, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert answer.json()["error"]["message"] == LATE.message


async def test_errors_for_those_who_ask_for_them(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={**BODY, "on_timeout": "error"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    answer = await http.post(
        "/v1/completions", json={**BODY, "stream": True}, headers={"x-on-timeout": "error"}
    )
    *_, chunk, error = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    assert (chunk["choices"][0]["finish_reason"], error["error"]["code"]) == ("error", "deadline_exceeded")


async def test_each_choice_ends_as_far_as_it_has_come(
    http: httpx.AsyncClient, model: ServedModel, dispatcher: LateDispatcher
) -> None:
    dispatcher.after = (0, 5, 99)  # one without a token, one that is cut, one that ends by itself
    expected = {0: ("", "timeout"), 1: (text_of(model, 5), "timeout"), 2: (text_of(model, 12), "length")}
    body = {**BODY, "n": 3, "max_tokens": 12}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert {c["index"]: (c["text"], c["finish_reason"]) for c in answer["choices"]} == expected
    assert answer["usage"]["completion_tokens"] == 17
    texts, reasons = dict.fromkeys(expected, ""), {}
    for chunk in await events(http, "/v1/completions", body):
        for choice in chunk["choices"]:
            assert choice["index"] not in reasons, "nothing comes after the last chunk"
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    assert {index: (texts[index], reasons[index]) for index in expected} == expected


async def test_of_the_likeliest_those_without_a_token_come_last(
    http: httpx.AsyncClient, dispatcher: LateDispatcher
) -> None:
    dispatcher.after = (0, 5)
    answer = (await http.post("/v1/completions", json={**BODY, "best_of": 2})).json()
    assert answer["choices"][0]["text"]


async def test_a_tool_call_that_is_cut(
    http: httpx.AsyncClient, model: ServedModel, dispatcher: LateDispatcher
) -> None:
    ids = model.tokenizer.fast.encode(CALL, add_special_tokens=False).ids
    dispatcher.script, dispatcher.after = lambda request: ids, (len(ids) - 12,)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "timeout": 20}
    (choice,) = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    assert choice["finish_reason"] == "timeout"
    chunks = await events(http, "/v1/chat/completions", body)
    assert [
        c["choices"][0]["finish_reason"] for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]
    ] == ["timeout"]
