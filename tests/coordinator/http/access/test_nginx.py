"""Through nginx, with the configuration of docs/proxies.md: streams arrive as they come, and no answer is
another request's."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from e2e.cluster import free_port
from support.certificates import write_certificate
from support.http_fakes import ANSWER, FakeDispatcher
from support.nginx import PROGRAM, nginx
from support.websocket_client import connect

from splitserve.cli.server_access import pinned
from splitserve.coordinator.front_door import FrontDoor
from splitserve.coordinator.http.access.access import Access
from splitserve.coordinator.http.access.forwarded import TrustedProxies
from splitserve.coordinator.metrics.request_record import RequestRecord
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="nginx is not installed (deploy/setup.sh does)")
PAGE = Path(__file__).resolve().parents[4] / "docs" / "proxies.md"
BODY = {"model": "tiny", "prompt": "Hi", "temperature": 0, "max_tokens": 1000}


@pytest.fixture
async def server(dispatcher: FakeDispatcher, model: ServedModel) -> AsyncIterator[HttpServer]:
    front = FrontDoor(Access(["llm.example.org"]), proxies=TrustedProxies(["127.0.0.1"]))
    server = HttpServer(HttpApp(dispatcher, model, AppParts(front=front)))
    await server.start()
    yield server
    await server.stop(grace_s=0)


@pytest.fixture
def proxy(server: HttpServer, tmp_path: Path) -> Iterator[int]:
    """nginx's port. It passes all clients' requests on over two connections that it keeps."""
    certificate, key = write_certificate(tmp_path, "llm.example.org")
    port, found = free_port(), re.search(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    text = (
        found[1]
        .replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        .replace("443 ssl", f"127.0.0.1:{port} ssl")
    )
    text = (
        text.replace("keepalive 64", "keepalive 2")
        .replace("/etc/ssl/llm.pem", str(certificate))
        .replace("/etc/ssl/llm.key", str(key))
    )
    with nginx(tmp_path, text, port):
        yield port


@pytest.fixture
async def http(proxy: int, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"host": "llm.example.org"}
    async with httpx.AsyncClient(
        base_url=f"https://127.0.0.1:{proxy}",
        headers=headers,
        verify=pinned(tmp_path / "certificate.pem"),
        timeout=60,
    ) as http:
        yield http


async def test_answers_streams_and_websockets(
    http: httpx.AsyncClient, server: HttpServer, proxy: int, tmp_path: Path
) -> None:
    records: list[RequestRecord] = []
    server.app.metrics.listeners.add("test", records.append)
    of_a_proxy_before = {"x-forwarded-for": "198.51.100.7", "forwarded": "for=203.0.113.9"}
    assert (await http.post("/v1/completions", json=BODY, headers=of_a_proxy_before)).json()["choices"][0][
        "text"
    ] == ANSWER
    assert [record.client for record in records] == ["198.51.100.7"]  # and nginx has removed the other header
    url = f"wss://llm.example.org:{proxy}/v1/stream"
    async with connect(url, host="127.0.0.1", ssl=pinned(tmp_path / "certificate.pem")) as socket:
        await socket.send(json.dumps({"id": "a", "endpoint": "/v1/completions", "body": BODY}))
        assert json.loads(await socket.recv())["id"] == "a"


async def test_tokens_arrive_as_they_come(http: httpx.AsyncClient, dispatcher: FakeDispatcher) -> None:
    dispatcher.step_s = 0.05
    async with http.stream(
        "POST", "/v1/completions", json={**BODY, "stream": True, "ignore_eos": True}
    ) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                break
        assert dispatcher.running  # the first token is here, and the last has not been made
    await dispatcher.until(lambda: not dispatcher.running)  # nginx closes, too


async def test_no_answer_is_anothers(
    proxy: int, tmp_path: Path, server: HttpServer, dispatcher: FakeDispatcher
) -> None:
    """Attackers send bodies that are requests behind Upgrade, and badly framed ones; beside them others ask
    what only they ask."""
    context, chance = pinned(tmp_path / "certificate.pem"), random.Random(1)
    smuggled = b"GET /v1/models/smuggled HTTP/1.1\r\nhost: llm.example.org\r\n\r\n"
    heads = [
        b"connection: Upgrade\r\nupgrade: foo\r\ncontent-length: %d\r\n" % len(smuggled),
        b"connection: Upgrade\r\nupgrade: websocket\r\ncontent-length: %d\r\n" % len(smuggled),
        b"connection: Upgrade\r\nupgrade: h2c\r\ntransfer-encoding: chunked\r\n",
        b"content-length: %d\r\ntransfer-encoding: chunked\r\n" % len(smuggled),
        b"transfer-encoding: xchunked\r\ncontent-length: %d\r\n" % len(smuggled),
        b"content-length: %d\r\ncontent-length: 0\r\n" % len(smuggled),
    ]

    async def attack() -> None:
        for _ in range(40):
            method, path = (
                chance.choice([b"POST", b"GET"]),
                chance.choice([b"/v1/completions", b"/health", b"/v1/stream", b"/tokenize"]),
            )
            head = b"%b %b HTTP/1.1\r\nhost: llm.example.org\r\n%b\r\n" % (method, path, chance.choice(heads))
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy, ssl=context)
            writer.write(head)
            await writer.drain()
            await asyncio.sleep(0.001)  # so that the body may come by itself; nothing depends on it
            writer.write(smuggled)
            async with asyncio.timeout(60):
                assert await reader.readline()
            writer.transport.abort()

    async def ask(http: httpx.AsyncClient, name: int) -> None:
        for number in range(40):
            answer = await http.get(f"/v1/models/{name}-{number}")
            assert f"{name}-{number}" in answer.text
            text = f"x{name} {number}"
            ids = (await http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()[
                "tokens"
            ]
            assert server.app.generation.models.first.tokenizer.decode(ids) == text

    headers = {"host": "llm.example.org"}
    async with httpx.AsyncClient(
        base_url=f"https://127.0.0.1:{proxy}", headers=headers, verify=context, timeout=60
    ) as http:
        await asyncio.gather(*(attack() for _ in range(3)), *(ask(http, name) for name in range(4)))
