"""An HTTP server with batches over a fake dispatcher."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from openai import AsyncOpenAI
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.batch.files import StoredFile
from splitserve.coordinator.batch.runner import BatchOptions
from splitserve.coordinator.batch.store import BatchStore
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.images.fetching import ImageFetcher
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel

CHAT = "/v1/chat/completions"


@asynccontextmanager
async def serving(
    dispatcher: FakeDispatcher, model: ServedModel, path: Path, images: ImageFetcher | None = None
) -> AsyncIterator[AsyncOpenAI]:
    app = HttpApp(
        dispatcher,
        model,
        AppParts(HttpLimits(), dispatcher.system, batches=BatchOptions(path, max_running=4), images=images),
    )
    server = HttpServer(app)
    await server.start()
    plain = httpx.AsyncClient(verify=False, timeout=60)  # reading certificates takes longer than a test
    url = f"http://127.0.0.1:{server.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=plain) as client:
        yield client
    await server.stop(grace_s=0)
    assert not dispatcher.running


def add_file(store: BatchStore, tenant: str, content: bytes, now: float) -> StoredFile:
    """Store a whole file."""
    id = store.begin_file(tenant, "in.jsonl", now)
    store.add_part(tenant, id, content)
    return store.end_file(tenant, id, "batch")
