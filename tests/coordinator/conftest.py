"""A tiny model and a real server on loopback, in front of a dispatcher that answers from a script."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from queue import Queue

import httpx
import pytest
import uvloop
from openai import AsyncOpenAI
from support.http_fakes import ADMIN_KEY, ANSWER, OPERATOR, FakeDispatcher, write_tiny_model
from support.small_disk import SmallDisk, small_disk
from support.tool_answers import Answering

from splitserve.coordinator.batch.runner import BatchOptions
from splitserve.coordinator.chat_output.style import ChatStyle
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.lifecycle.request import Request
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.chat_template import ChatTemplate
from splitserve.coordinator.text.served_model import ServedModel


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def model(model_folder: Path) -> ServedModel:
    return ServedModel.load(model_folder, "tiny", ["tiny-1", "gpt-4o"])


@pytest.fixture
def dispatcher(model: ServedModel) -> FakeDispatcher:
    """Answers ANSWER; sampled requests start it at a place that depends on the seed."""
    ids = model.tokenizer.fast.encode(ANSWER, add_special_tokens=False).ids

    def script(request: Request) -> list[int]:
        turn = 0 if request.sampling.temperature == 0 else request.sampling.seed % len(ids)
        return ids[turn:] + ids[:turn]

    return FakeDispatcher(script)


@pytest.fixture
def limits() -> HttpLimits:
    return HttpLimits(max_body_bytes=1 << 20, request_timeout_s=30)


@pytest.fixture
async def server(
    dispatcher: FakeDispatcher, model: ServedModel, limits: HttpLimits
) -> AsyncIterator[HttpServer]:
    server = HttpServer(HttpApp(dispatcher, model, AppParts(limits, dispatcher.system, Operators(ADMIN_KEY))))
    await server.start()
    yield server
    await server.stop(grace_s=0)
    assert not dispatcher.running
    assert server.app.metrics.num_open == 0


@pytest.fixture
async def http(server: HttpServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", verify=False, timeout=60, headers=OPERATOR
    ) as client:
        yield client


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[AsyncOpenAI]:
    plain = httpx.AsyncClient(verify=False, timeout=60)  # reading certificates takes longer than a test
    url = f"http://127.0.0.1:{server.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=plain) as client:
        yield client


@pytest.fixture
def fuzzed(model: ServedModel, dispatcher: FakeDispatcher, tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of a server that runs in another thread, under uvloop, for tests that are not coroutines."""
    ports: Queue[int] = Queue()
    batches = BatchOptions(tmp_path / "batches.db")

    async def serve() -> None:
        server = HttpServer(
            HttpApp(
                dispatcher,
                model,
                AppParts(
                    HttpLimits(max_body_bytes=1 << 20),
                    dispatcher.system,
                    Operators(ADMIN_KEY),
                    batches=batches,
                    ollama=True,
                ),
            )
        )
        await server.start()
        ports.put(server.port)
        await asyncio.to_thread(done.wait)
        await server.stop(grace_s=0)

    done = threading.Event()
    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    with httpx.Client(
        base_url=f"http://127.0.0.1:{ports.get(timeout=60)}", verify=False, timeout=60, headers=OPERATOR
    ) as client:
        yield client
    done.set()
    thread.join(60)


@pytest.fixture
async def redis_server(tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a Redis of this test's own."""
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server; Debian's package is redis-server")
    socket = tmp_path / "redis.sock"
    command = [
        "redis-server",
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--save",
        "",
        "--dir",
        str(tmp_path),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(60):
            while not await _listens(socket):
                await asyncio.sleep(0.01)
        yield f"unix://{socket}"
    finally:
        server.terminate()
        server.wait()


async def _listens(socket: Path) -> bool:
    """Its file is there before it does."""
    try:
        _, writer = await asyncio.open_unix_connection(str(socket))
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
async def answering(model: ServedModel, limits: HttpLimits) -> AsyncIterator[Answering]:
    """A client of a model that gives this answer, and the dispatcher that gave it."""
    servers: list[HttpServer] = []
    clients: list[AsyncOpenAI] = []

    async def start(
        answer: str | list[int],
        style: ChatStyle | None = None,
        template: str | None = None,
        of: ServedModel = model,
    ) -> tuple[AsyncOpenAI, FakeDispatcher]:
        written = isinstance(answer, str)
        ids = of.tokenizer.fast.encode(answer, add_special_tokens=False).ids if written else answer
        dispatcher = FakeDispatcher(lambda request: ids)
        served = dataclasses.replace(of, chat_style=style or ChatStyle())
        if template is not None:
            served = dataclasses.replace(served, chat_template=ChatTemplate(template))
        server = HttpServer(HttpApp(dispatcher, served, AppParts(limits, dispatcher.system)))
        await server.start()
        servers.append(server)
        plain = httpx.AsyncClient(verify=False, timeout=60)  # reading certificates takes longer than a test
        url = f"http://127.0.0.1:{server.port}/v1"
        clients.append(AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=plain))
        return clients[-1], dispatcher

    yield start
    for client in clients:
        await client.close()
    for server in servers:
        await server.stop(grace_s=0)
