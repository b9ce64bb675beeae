"""Idempotency keys: an answer's name and seed, the ids of events, and the rest of a stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import httpx
import orjson
import pytest
from coordinator.generate.test_adapters_by_http import PADDING
from support.http_fakes import ANSWER, CALL, FakeDispatcher
from support.routed_server import Routed

from splitserve.coordinator.generate.resumption import IdempotencyKey
from splitserve.coordinator.http.call import Call
from splitserve.coordinator.lifecycle.request import Request
from splitserve.coordinator.tenants.limits import Account
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.transport.messages.messages import SamplingParams

CHAT = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 90}
TEXT = "/v1/completions", {"prompt": "Hi", "max_tokens": 90}
BOTH = pytest.mark.parametrize(("path", "body"), [CHAT, TEXT])
KEY = {"idempotency-key": "k-1"}
GREEDY = {"temperature": 0, "stream": True}


async def stream(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str]
) -> list[tuple[str, str]]:
    """Return the events of a stream: each one's text, and its id."""
    answer = await http.post(path, json={**body, **GREEDY}, headers=headers)
    assert answer.status_code == 200, answer.text
    events = []
    for event in answer.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.splitlines())
        if lines.get("data", "[DONE]") != "[DONE]":
            (choice,) = orjson.loads(lines["data"])["choices"]
            events.append(
                (choice.get("text") or choice.get("delta", {}).get("content", ""), lines.get("id", ""))
            )
    return events


def text_of(events: list[tuple[str, str]]) -> str:
    return "".join(text for text, _ in events)


@BOTH
async def test_from_any_event_on_the_rest_alone_is_sent(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    whole = await stream(http, path, body, KEY)
    assert text_of(whole).startswith(ANSWER[:40])
    ids = {id: text_of(whole[: place + 1]) for place, (_, id) in enumerate(whole) if id}
    assert len(ids) > 5
    for id, seen in ids.items():
        rest = await stream(http, path, body, {**KEY, "last-event-id": id})
        assert seen + text_of(rest) == text_of(whole)
    assert await stream(http, path, body, {}) == [(text, "") for text, _ in whole], "no ids without a key"


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


async def events_with_ids(
    http: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]
) -> list[Any]:
    """Return each event of a chat's stream: its id, its choices without calls' ids, and its usage's total."""
    answer = await http.post(CHAT[0], json={**CHAT[1], **body, **GREEDY}, headers={**KEY, **headers})
    assert answer.status_code == 200, answer.text
    events = []
    for event in answer.text.split("\n\n")[:-2]:
        id, data = event.split("\n")
        shown = orjson.loads(data.removeprefix("data: "))
        for choice in shown["choices"]:
            for call in choice["delta"].get("tool_calls", ()):
                call.pop("id", None)
        usage = shown.get("usage") or {}
        events.append((id.removeprefix("id: "), shown["choices"], usage.get("total_tokens")))
    assert answer.text.endswith("data: [DONE]\n\n")
    return events


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": [WEATHER], "max_tokens": 500, "stream_options": {"include_usage": True}},
        {"stop": ["jumps over"]},
        {"logprobs": True, "top_logprobs": 1},
        {"max_tokens": 3},
    ],
)
async def test_each_event_of_one_write_has_its_own_place(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel, more: dict[str, Any]
) -> None:
    if "tools" in more:
        text = f"First 世界 😀.{CALL}\n{CALL}"
        ids = model.tokenizer.fast.encode(text, add_special_tokens=False).ids
        dispatcher.script = lambda request: ids
    whole = await events_with_ids(http, more, {})
    ids_seen = [id for id, *_ in whole]
    assert len(set(ids_seen)) == len(ids_seen)
    assert any("." in id for id in ids_seen), "the end's"
    for place, id in enumerate(ids_seen):
        dispatcher.tokens_per_flush = 1 + place % 5  # the next coordinator has them in other groups
        assert await events_with_ids(http, more, {"last-event-id": id}) == whole[place + 1 :]


async def test_an_event_that_the_answer_does_not_have_is_refused(http: httpx.AsyncClient) -> None:
    path, body = CHAT
    asked = {"json": {**body, **GREEDY}}
    id = (await events_with_ids(http, {}, {}))[4][0]
    answer = await http.post(path, headers={**KEY, "last-event-id": f"{id}.7"}, **asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "answer_differs")


@BOTH
async def test_the_rest_of_another_answer_is_refused(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    id = (await stream(http, path, body, KEY))[-2][1]
    num_tokens, _, checksum = id.partition("-")
    for wrong in (f"{num_tokens}-{int(checksum, 16) ^ 1:08x}", f"{int(num_tokens) + 5000}-{checksum}"):
        answer = await http.post(path, json={**body, **GREEDY}, headers={**KEY, "last-event-id": wrong})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "answer_differs")
        assert "ask again without this header" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers", [{"idempotency-key": ""}, {"idempotency-key": "a b"}, {**KEY, "last-event-id": "7"}]
)
async def test_headers_that_mean_nothing_are_refused(
    http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    path, body = TEXT
    answer = await http.post(path, json=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == ("Last-Event-ID" if len(headers) > 1 else "Idempotency-Key")


async def test_key_body_choice_and_tenant_name_an_answer(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    path, body = TEXT

    async def named(headers: dict[str, str], **more: Any) -> list[tuple[bytes, int]]:
        count = len(dispatcher.requests)
        assert (await http.post(path, json={**body, **more}, headers=headers)).status_code == 200
        return [(r.answer_id, r.sampling.seed) for r in dispatcher.requests[count:]]

    first = await named(KEY)
    assert await named(KEY) == first
    both = await named(KEY, n=2)
    assert both[0] == first[0]
    assert len({*first, *both}) == 2
    others = [
        *await named({"idempotency-key": "k-2"}),
        *await named(KEY, prompt="Ho"),
        *await named(KEY, max_tokens=91),
        *await named(KEY, cache_salt="mine"),
    ]
    assert len({answer_id for answer_id, _ in [*both, *others]}) == 6
    assert others[0][1] != first[0][1], "another key is another seed"
    assert [seed for _, seed in await named(KEY, seed=3)] == [3]
    assert [answer_id for answer_id, _ in await named({})] == [b""]
    assert [answer_id for answer_id, _ in await named(KEY, logprobs=1)] == [b""], "it is not kept"


OF_OTHERS = pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 90}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)


@OF_OTHERS
async def test_a_key_names_the_answers_of_other_apis(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str, more: dict[str, Any]
) -> None:
    body = {"model": "tiny", "temperature": 0, **more}
    texts = [(await http.post(path, json={**body, "stream": True}, headers=KEY)).text for _ in range(2)]
    await http.post(path, json=body, headers=KEY)
    assert all(text.startswith("event: ") and "\nid: " not in text for text in texts)
    assert len(texts[0]) == len(texts[1]) > 2000, "ids have one length"
    assert (
        {request.answer_id for request in dispatcher.requests} == {dispatcher.requests[0].answer_id} != {b""}
    )


@OF_OTHERS
async def test_an_event_that_has_no_id_is_refused(
    http: httpx.AsyncClient, path: str, more: dict[str, Any]
) -> None:
    answer = await http.post(
        path, json={"model": "tiny", **more}, headers={**KEY, "last-event-id": "1-00000000"}
    )
    assert answer.status_code == 400
    assert "leave it out for the whole answer" in answer.text


def test_a_key_is_its_tenants_own() -> None:
    def digest_of(tenant: str, key: bytes) -> bytes:
        call = SimpleNamespace(headers={b"idempotency-key": key}, account=Account(tenant=tenant))
        found = IdempotencyKey.of(cast(Call, call))
        assert found is not None
        return found.digest

    digests = {
        digest_of(*asked) for asked in (("a", b"k"), ("b", b"k"), ("", b"k"), ("a", b"bk"), ("ab", b"k"))
    }
    assert len(digests) == 5


def name(sampling: SamplingParams) -> bytes:
    asked = SimpleNamespace(
        adapter="", sampling=sampling, prompt_token_ids=[1], prompt_logprobs=None, salt=b"", embeds=False
    )
    return IdempotencyKey(b"k", None).applied(cast(Request, asked), 0, 7).answer_id


def test_biases_are_a_part_of_an_answers_name_in_whichever_order() -> None:
    names = [
        name(SamplingParams(max_tokens=9, logit_bias=bias))
        for bias in ({5: 1.0, 40: 2.0}, {40: 2.0, 5: 1.0}, {5: 1.0, 40: 2.5}, {5: 1.0}, {})
    ]
    assert names[0] == names[1]
    assert len(set(names)) == 4


def test_a_neighbouring_build_gives_an_answer_the_same_name() -> None:
    class NextSamplingParams(SamplingParams, frozen=True, kw_only=True):
        of_tomorrow: int = 0

    same = name(SamplingParams(max_tokens=9, top_k=4, seed=7))
    assert name(NextSamplingParams(max_tokens=9, top_k=4, seed=7)) == same
    assert name(NextSamplingParams(max_tokens=9, top_k=4, seed=7, of_tomorrow=1)) != same
    assert name(SamplingParams(max_tokens=9, top_p=0.5, seed=7)) != same


async def test_a_stream_goes_on_with_the_model_that_began_it(routed: Routed) -> None:
    """Whatever the shares are by then, and nowhere else."""
    path, body = TEXT[0], {**TEXT[1], **GREEDY, "model": "chat"}

    async def ids(headers: dict[str, str], **more: Any) -> list[str]:
        answer = await routed.http.post(path, json={**body, **more}, headers=headers)
        assert answer.status_code == 200, answer.text
        return [line for line in answer.text.splitlines() if line.startswith("id: ")]

    whole = await ids(KEY)
    half = len(whole) // 2
    last = {**KEY, "last-event-id": whole[half].removeprefix("id: ")}
    routed.write(shares={"a": 0, "b": 1})
    assert await ids(last) == await ids(last, **PADDING) == whole[half + 1 :] != []
    assert routed.counts() == (3, 0)
    routed.a.workers = False
    assert (await routed.http.post(path, json=body, headers=last)).status_code == 503
    routed.write(shares={"b": 1})
    await routed.http.post(path, json=body, headers=last)
    assert routed.counts() == (3, 1), "it is no model of the route any more"
