"""Chats with images by http address, in each dialect that has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from support.batch_server import serving
from support.http_fakes import ADMIN_KEY, FakeDispatcher
from support.image_host import NEVER, ImageHost, answer, image_host
from support.image_models import CHAT, CLAUDE, RESPONSES, TALL, WIDE, encoded, of, part, picture, text

from splitserve.coordinator.dialects.responses_store import SqliteResponses
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.http.limits import LARGE_BODY_BYTES, HttpLimits
from splitserve.coordinator.http.overload import Overload
from splitserve.coordinator.images.fetching import ImageFetcher
from splitserve.coordinator.images.hosts import ImageHosts
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel


@pytest.fixture
async def host() -> AsyncIterator[ImageHost]:
    pages = {"/wide": answer(WIDE), "/tall": answer(TALL), "/no": answer(b"hi"), "/never": NEVER}
    async with image_host(pages) as host:
        yield host


@pytest.fixture
async def server(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path, host: ImageHost
) -> AsyncIterator[HttpServer]:
    store, overload = SqliteResponses(tmp_path / "responses.sqlite", keep_s=3600), Overload()
    images = ImageFetcher(ImageHosts([f"127.0.0.1:{host.port}"]), 1 << 20, overload)
    more: Any = {"overload": overload, "images": images, "responses": store}
    parts = AppParts(HttpLimits(), dispatcher.system, Operators(ADMIN_KEY), **more)
    server = HttpServer(HttpApp(dispatcher, model, parts))
    await server.start()
    yield server
    await server.stop(grace_s=0)
    assert not dispatcher.running
    assert overload.used["image_bytes"] == overload.used["tokenizer_bytes"] == 0


def at(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def sizes(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, path: str, body: dict[str, Any]
) -> list[tuple[int, int]]:
    """Return rows and columns of the request's images."""
    more = {"max_tokens": 50} if path == CLAUDE else {}
    answered = await http.post(path, json={"model": "tiny", "temperature": 0, **more, **body})
    assert answered.status_code == 200, answered.text
    return [(image.height // 32, image.width // 32) for image in dispatcher.requests[-1].images]


async def test_chats(http: httpx.AsyncClient, dispatcher: FakeDispatcher, host: ImageHost) -> None:
    wide, tall = at(host.url("/wide")), at(host.url("/tall"))
    messages = [of(text("a"), wide, part(TALL)), of(tall, wide)]
    found = await sizes(http, dispatcher, CHAT, {"messages": messages})
    assert found == [(2, 3), (5, 2), (5, 2), (2, 3)]
    assert sorted(host.paths) == ["/tall", "/wide"]
    refused = await http.post(CHAT, json={"messages": [of(text("a" * LARGE_BODY_BYTES), wide)]})
    assert "maximum context length" in refused.text
    assert len(host.paths) == 2  # not before all else is in order


async def test_a_large_body(http: httpx.AsyncClient, dispatcher: FakeDispatcher, host: ImageHost) -> None:
    both = [part(encoded(picture(300, 400))), at(host.url("/wide"))]
    found = await sizes(http, dispatcher, CHAT, {"messages": [of(*both)]})
    assert found[1] == (2, 3)


async def test_responses_go_on_with_the_address(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, host: ImageHost
) -> None:
    image = {"type": "input_image", "image_url": host.url("/wide")}
    body = {"model": "tiny", "input": [of(image)], "temperature": 0, "background": True}
    first = (await http.post(RESPONSES, json=body)).json()
    while first["status"] in ("queued", "in_progress"):
        first = (await http.get(f"{RESPONSES}/{first['id']}")).json()
    assert first["status"] == "completed"
    more = {"input": "More?", "previous_response_id": first["id"]}
    assert await sizes(http, dispatcher, RESPONSES, more) == [(2, 3)]
    (item,) = (await http.get(f"{RESPONSES}/{first['id']}/input_items")).json()["data"]
    assert item["content"][0]["image_url"] == host.url("/wide")
    assert host.paths == ["/wide", "/wide"]


async def test_anthropics_blocks(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, host: ImageHost
) -> None:
    block = {"type": "image", "source": {"type": "url", "url": host.url("/tall")}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    messages = [of(block), of(call, role="assistant"), of(result)]
    assert await sizes(http, dispatcher, CLAUDE, {"messages": messages}) == [(5, 2), (5, 2)]
    counted = await http.post(f"{CLAUDE}/count_tokens", json={"model": "tiny", "messages": [of(block)]})
    assert counted.status_code == 400
    assert "images are fetched for answers alone" in counted.text
    assert host.paths == ["/tall"]


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/gone", "messages[0].content[1].image_url: {} answered 404"),
        ("/no", "messages[0].content: part 1 is an image, but it is no PNG"),
        ("http://localhost/", "messages[0].content[1].image_url: {} has a host or port that is none of"),
        ("http://a b:c/", "messages[0].content[1].image_url: {} is no valid address"),
    ],
)
async def test_refusals(http: httpx.AsyncClient, host: ImageHost, path: str, fault: str) -> None:
    url = path if path.startswith("http") else host.url(path)
    refused = await http.post(CHAT, json={"messages": [of(text("a"), at(url))]})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(fault.format(url))


async def test_a_client_that_goes(http: httpx.AsyncClient, server: HttpServer, host: ImageHost) -> None:
    body = {"messages": [of(at(host.url("/never")))]}
    asking = asyncio.ensure_future(http.post(CHAT, json=body))
    while not host.heads:
        await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(host.left.wait(), 20)
    while server.app.generation.preparing:
        await asyncio.sleep(0.001)
    assert server.app.metrics.num_open == 0


async def test_batches(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path, host: ImageHost
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": CHAT}
    body = {"model": "tiny", "messages": [of(at(host.url("/wide")))]}
    images = ImageFetcher(ImageHosts([f"127.0.0.1:{host.port}"]), 1 << 20, Overload())
    async with serving(dispatcher, model, tmp_path / "batches.db", images) as client:
        file = await client.files.create(file=("a", orjson.dumps({**line, "body": body})), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        while batch.status not in ("completed", "failed"):
            batch = await client.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 1
    assert len(dispatcher.requests[0].images) == 1


async def test_a_requests_timeout_bounds_its_fetches(http: httpx.AsyncClient, host: ImageHost) -> None:
    body = {"model": "tiny", "messages": [of(at(host.url("/never")))]}
    for more, headers in ({"timeout": 0.3}, {}), ({}, {"x-request-timeout": "0.3"}):
        answered = await http.post(CHAT, json={**body, **more}, headers=headers)
        assert answered.status_code == 504, answered.text
        assert "within its 0.3 s: its images were being fetched" in answered.text
    await host.left.wait()
