"""Idempotency keys: an answer's name and seed, the ids of events, and the rest of a stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import httpx
import orjson
import pytest
from support.http_fakes import ANSWER, FakeDispatcher

from splitserve.coordinator.generate.resumption import IdempotencyKey
from splitserve.coordinator.http.call import Call
from splitserve.coordinator.tenants.limits import Account

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
