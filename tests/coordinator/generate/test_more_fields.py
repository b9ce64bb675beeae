"""Fields beside the usual ones: best_of, token ids, truncation, tiers."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest
from support.http_fakes import ANSWER, MAX_MODEL_LEN, FakeDispatcher

from splitserve.coordinator.generate.bodies.chat import ChatCompletionRequest
from splitserve.coordinator.generate.plan import CLASS_TIERS, MAX_READ, ServiceTier, class_in_force
from splitserve.coordinator.lifecycle.request import PriorityClass, Request
from splitserve.coordinator.text.served_model import ServedModel

CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = "/v1/completions", {"prompt": "Hi", "max_tokens": 20}


async def chunks(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await http.post(path, json={**body, "stream": True})
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [orjson.loads(line) for line in lines if line != "[DONE]"]


async def test_the_best_of_several_by_token(http: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    path, body = TEXT
    every = (await http.post(path, json={**body, "seed": 3, "n": 6, "logprobs": 0})).json()
    by_mean = sorted(
        every["choices"], key=lambda c: -sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"])
    )
    best = (await http.post(path, json={**body, "seed": 3, "n": 2, "best_of": 6})).json()
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in by_mean[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert {choice["logprobs"] for choice in best["choices"]} == {None}
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]  # what was computed
    several = (await http.post(path, json={**body, "prompt": ["Hi", "Ho"], "best_of": 3})).json()
    assert [choice["index"] for choice in several["choices"]] == [0, 1]
    assert (await http.post(path, json={**body, "best_of": 3, "stream": True})).status_code == 400


@pytest.mark.parametrize(
    "more",
    [
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"echo": True, "logprobs": 1, "max_tokens": 1},
        {"prompt_logprobs": 0, "max_tokens": 1},
    ],
)
async def test_many_prompts_to_score_leave_room_in_the_queue(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, more: dict[str, Any]
) -> None:
    """2,000 at a time were more than the queue takes."""
    most = 0

    def counted(_: Request) -> None:
        nonlocal most
        most = max(most, len(dispatcher.running) + 1)

    dispatcher.refuse = counted
    prompts = [[7, 8 + number % 90] for number in range(2000)]
    body = {"model": "tiny", "prompt": prompts, "return_token_ids": True, **more}
    choices = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    assert most == MAX_READ


async def test_token_ids_of_the_output(
    http: httpx.AsyncClient, model: ServedModel, dispatcher: FakeDispatcher
) -> None:
    expected = model.tokenizer.fast.encode(ANSWER, add_special_tokens=False).ids
    for path, body in (CHAT, TEXT):
        asked = {**body, "return_token_ids": True, "temperature": 0, "max_tokens": 500}
        (choice,) = (await http.post(path, json=asked)).json()["choices"]
        assert choice["token_ids"] == [*expected, dispatcher.eos]
        choices = [choice for chunk in await chunks(http, path, asked) for choice in chunk["choices"]]
        assert [token for choice in choices for token in choice.get("token_ids", ())] == [
            *expected,
            dispatcher.eos,
        ]
        assert "token_ids" not in (await http.post(path, json=body)).json()["choices"][0]


async def test_a_prompt_keeps_its_end(http: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    path, body = TEXT
    ids = [5 + i % 300 for i in range(MAX_MODEL_LEN + 50)]
    for asked, kept in ((7, 7), (-1, MAX_MODEL_LEN - 20), (MAX_MODEL_LEN - 20, MAX_MODEL_LEN - 20)):
        response = await http.post(path, json={**body, "prompt": ids, "truncate_prompt_tokens": asked})
        assert response.status_code == 200, response.text
        assert list(dispatcher.requests[-1].prompt_token_ids) == ids[-kept:]
    assert (
        await http.post(path, json={**body, "prompt": ids, "truncate_prompt_tokens": MAX_MODEL_LEN})
    ).status_code == 400
    chat = {
        "messages": [{"role": "user", "content": "word " * 4000}],
        "truncate_prompt_tokens": -1,
        "max_completion_tokens": 30,
    }
    assert (await http.post(CHAT[0], json=chat)).status_code == 200
    assert len(dispatcher.requests[-1].prompt_token_ids) == MAX_MODEL_LEN - 30
    echoed = await http.post(
        path,
        json={**body, "prompt": "one two three", "truncate_prompt_tokens": 2, "echo": True, "logprobs": 0},
    )
    choice = echoed.json()["choices"][0]
    assert choice["text"].startswith("".join(choice["logprobs"]["tokens"][:2]))


async def test_a_tier_is_answered_where_one_is_asked_for(http: httpx.AsyncClient) -> None:
    for path, body in (CHAT, TEXT):
        more = {"service_tier": "auto", "metadata": {"a": "b"}, "safety_identifier": "x"}
        assert (await http.post(path, json={**body, **more})).json()["service_tier"] == "default"
        assert {chunk["service_tier"] for chunk in await chunks(http, path, {**body, **more})} == {"default"}
        assert "service_tier" not in (await http.post(path, json=body)).json()


@pytest.mark.parametrize(
    ("asked", "own", "runs_in", "reported"),
    [
        ("auto", "premium", "premium", "priority"),
        ("scale", "free", "free", "default"),
        ("default", "premium", "standard", "default"),
        ("default", "free", "free", "default"),
        ("priority", "premium", "premium", "priority"),
        ("priority", "standard", "standard", "default"),
        ("flex", "premium", "batch", "flex"),
        ("flex", "batch", "batch", "flex"),
    ],
)
def test_a_tier_asks_for_less_than_the_keys_class_and_never_for_more(
    asked: ServiceTier, own: PriorityClass, runs_in: PriorityClass, reported: ServiceTier
) -> None:
    assert class_in_force(asked, own) == runs_in
    assert CLASS_TIERS[runs_in] == reported
    assert class_in_force(None, own) == own


async def test_who_asks_for_flex_runs_in_batch(http: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    path, body = TEXT
    assert (await http.post(path, json={**body, "service_tier": "flex"})).json()["service_tier"] == "flex"
    assert dispatcher.requests[-1].priority_class == "batch"


async def test_a_cache_key_is_a_session(http: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    path, body = TEXT
    for headers, expected in (({}, "key"), ({"x-session-id": "session"}, "session")):
        await http.post(path, json={**body, "prompt_cache_key": "key", "user": "user"}, headers=headers)
        assert dispatcher.requests[-1].session == expected


async def test_padded_chunks_tell_no_lengths(http: httpx.AsyncClient) -> None:
    for path, body in (CHAT, TEXT):
        asked = {
            **body,
            "stream": True,
            "stream_options": {"include_obfuscation": True, "include_usage": True},
        }
        response = await http.post(path, json=asked)
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        assert len({orjson.loads(line)["obfuscation"] for line in lines}) > 1
        assert {len(line.encode()) % 256 for line in lines} == {0}
        plain = await chunks(http, path, {**body, "temperature": 0})
        padded = await chunks(
            http, path, {**body, "temperature": 0, "stream_options": {"include_obfuscation": True}}
        )
        assert [c["choices"][0].get("text") for c in plain] == [c["choices"][0].get("text") for c in padded]
        assert not any("obfuscation" in chunk for chunk in plain)


async def test_words_for_the_template(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    path, body = CHAT
    request = ChatCompletionRequest.model_validate({**body, "verbosity": "low", "reasoning_effort": "high"})
    assert request.template_variables == {"verbosity": "low", "reasoning_effort": "high"}
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Really."}]
    messages = [*body["messages"], {"role": "assistant", "content": parts}, *body["messages"]]
    assert (await http.post(path, json={"messages": messages})).status_code == 200
    assert "No.\nReally." in model.tokenizer.decode(dispatcher.requests[-1].prompt_token_ids)


async def test_a_template_of_the_client_is_refused(http: httpx.AsyncClient) -> None:
    messages = {"messages": [{"role": "user", "content": "Hi"}]}
    for path in ("/v1/chat/completions", "/tokenize"):
        refused = await http.post(path, json={**messages, "chat_template": "{{ messages }}"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
        assert "chat_template_kwargs" in refused.json()["error"]["message"]
        assert (await http.post(path, json={**messages, "chat_template": None})).status_code == 200
