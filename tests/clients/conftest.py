"""A server in a thread of its own, for clients outside this event loop or process. Its model answers
ANSWER or, where a grammar holds it to a call of ``weather`` or to anything else, CALL or CITY."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest
from support.http_fakes import ANSWER, CALL, CITY, FakeDispatcher, write_tiny_model

from splitserve.coordinator.batch.runner import BatchOptions
from splitserve.coordinator.lifecycle.request import Request
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return ServedModel.load(folder, "tiny")


@pytest.fixture
def base_url(served: ServedModel, tmp_path: Path) -> Iterator[str]:
    """The address of a server."""

    def expected(request: Request) -> list[int]:
        grammar = request.sampling.grammar
        text = ANSWER if not grammar else CALL if b"weather" in grammar else CITY
        return served.tokenizer.fast.encode(text, add_special_tokens=False).ids

    dispatcher = FakeDispatcher(expected)
    ports: Queue[int] = Queue()
    done = threading.Event()

    async def serve() -> None:
        server = HttpServer(
            HttpApp(
                dispatcher,
                served,
                AppParts(system=dispatcher.system, batches=BatchOptions(tmp_path / "batches.db")),
            )
        )
        await server.start()
        ports.put(server.port)
        await asyncio.to_thread(done.wait)
        await server.stop(grace_s=0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    yield f"http://127.0.0.1:{ports.get(timeout=60)}/v1"
    done.set()
    thread.join(60)
