"""What clients see of their limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.tenants.opening import KeyDirectory
from splitserve.coordinator.tenants.shared_limiter import SharedLimiter
from splitserve.coordinator.tenants.store import TenantStore
from splitserve.coordinator.tenants.tenancy import Tenancy
from splitserve.coordinator.text.served_model import ServedModel

URL = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture
async def limited(
    tmp_path: Path, dispatcher: FakeDispatcher, model: ServedModel
) -> AsyncIterator[tuple[TenantStore, httpx.AsyncClient]]:
    """A tenant with one key, and the client that has it; limits of the tier ``t`` are set before the first
    request."""
    store = TenantStore(tmp_path / "tenants", create=True)
    store.set_tier("t", None, {})
    store.set_tenant("acme", tier="t")
    key = store.create_key("acme").key
    directory = KeyDirectory(tmp_path / "tenants")
    following = asyncio.create_task(directory.follow(0.005))
    limiter = SharedLimiter(tmp_path / "limits", clock=lambda: 1e9)
    server = HttpServer(HttpApp(dispatcher, model, AppParts(tenancy=Tenancy(directory, limiter))))
    await server.start()
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", verify=False, headers=headers, timeout=60
    ) as client:
        yield store, client
    following.cancel()
    await server.stop(grace_s=0)
    await limiter.stop()


async def until_limited(client: httpx.AsyncClient) -> httpx.Response:
    """The first answer that speaks of limits: the directory has followed."""
    async with asyncio.timeout(60):
        while "x-ratelimit-limit-requests" not in (answer := await client.post(URL, json=BODY)).headers:
            await asyncio.sleep(0.005)
    return answer


async def test_429_says_what_and_when(limited: tuple[TenantStore, httpx.AsyncClient]) -> None:
    store, client = limited
    store.set_tier("t", None, {"requests_per_minute": 2})
    first = await until_limited(client)
    assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "1")
    streamed = await client.post(URL, json={**BODY, "stream": True})
    assert (streamed.status_code, streamed.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    refused = await client.post(URL, json=BODY)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert refused.json()["error"] == {
        "message": "Rate limit reached: 2 requests per minute, and this request needs 1. Try again in 30s.",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }


async def test_tokens_are_given_back_that_were_not_used(
    limited: tuple[TenantStore, httpx.AsyncClient],
) -> None:
    store, client = limited
    store.set_tier("t", None, {"requests_per_minute": 1000, "tokens_per_minute": 10_000})
    first = await until_limited(client)
    taken = 10_000 - int(first.headers["x-ratelimit-remaining-tokens"])
    used = first.json()["usage"]["total_tokens"]
    assert taken == used  # eight tokens were asked for, and came
    longer = await client.post(URL, json={**BODY, "max_tokens": 500})
    assert (
        10_000 - int(longer.headers["x-ratelimit-remaining-tokens"])
        == used + longer.json()["usage"]["prompt_tokens"] + 500
    )
    last = await client.post(URL, json=BODY)
    used += longer.json()["usage"]["total_tokens"] + last.json()["usage"]["total_tokens"]
    assert 10_000 - int(last.headers["x-ratelimit-remaining-tokens"]) == used


async def test_open_streams_are_bounded_and_end(
    limited: tuple[TenantStore, httpx.AsyncClient], dispatcher: FakeDispatcher
) -> None:
    store, client = limited
    store.set_tier("t", None, {"requests_per_minute": 1000, "max_streams": 1})
    await until_limited(client)
    dispatcher.hold = True
    open_one = asyncio.create_task(client.post(URL, json=BODY))
    await dispatcher.until(lambda: bool(dispatcher.running))
    refused = await client.post(URL, json=BODY)
    assert (refused.status_code, "open at the same time" in refused.text) == (429, True)
    open_one.cancel()  # the client goes away
    await dispatcher.until(lambda: not dispatcher.running)
    dispatcher.hold = False
    assert (await client.post(URL, json=BODY)).status_code == 200


async def test_a_quota_is_another_kind_of_429(limited: tuple[TenantStore, httpx.AsyncClient]) -> None:
    store, client = limited
    store.set_tier("t", None, {"requests_per_minute": 1000, "tokens_per_day": 5})
    async with asyncio.timeout(60):
        while (answer := await client.post(URL, json=BODY)).status_code == 200:
            await asyncio.sleep(0.005)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")
    assert int(answer.headers["retry-after"]) <= 86_400
