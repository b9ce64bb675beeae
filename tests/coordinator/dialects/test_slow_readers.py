"""A client of another API that reads its stream too slowly for the bound on what waits for it."""

from __future__ import annotations

import asyncio
import json
import socket
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 1900}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1900}),
        ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 1900}}),
    ],
)
async def test_an_answer_that_is_cut_off_does_not_look_complete(
    model: ServedModel, dispatcher: FakeDispatcher, path: str, body: dict[str, Any]
) -> None:
    """It ended as `completed`, with what had waited until then."""
    server = HttpServer(
        HttpApp(dispatcher, model, AppParts(HttpLimits(max_buffered_bytes=20_000), ollama=True))
    )
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ids = model.tokenizer.fast.encode("the quick brown fox", add_special_tokens=False).ids
    dispatcher.script = lambda _: (ids * 400)[:1850]
    await server.start()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        data = json.dumps({"model": "tiny", "temperature": 0, "stream": True, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(b"%bcontent-length: %d\r\n\r\n%b" % (head.encode(), len(data), data))
        await dispatcher.until(lambda: bool(dispatcher.cancelled))
        client.settimeout(60)
        response = HTTPResponse(client)
        await asyncio.to_thread(response.begin)
        end = (await asyncio.to_thread(response.read)).decode().strip().splitlines()[-1]
    assert "read too slowly" in end
    await server.stop(grace_s=0)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_that_comes_in_one_piece_is_not_read_too_slowly(
    model: ServedModel, dispatcher: FakeDispatcher, streamed: bool
) -> None:
    """A worker that kept the answer of an idempotency key sends all of it at once, each token an event."""
    dispatcher.script, dispatcher.tokens_per_flush = lambda _: [300] * 900, 800
    server = HttpServer(HttpApp(dispatcher, model, AppParts(HttpLimits(max_buffered_bytes=20_000))))
    await server.start()
    body = {"model": "tiny", "input": "Hi", "max_output_tokens": 1000, "stream": streamed}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client:
        answer = await client.post("/v1/responses", json=body, headers={"idempotency-key": "again"})
    await server.stop(grace_s=0)
    assert answer.status_code == 200
    assert '"status":"completed"' in answer.text
    assert "read too slowly" not in answer.text
