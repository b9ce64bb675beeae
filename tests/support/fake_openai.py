"""A server that speaks just enough of the API to test clients: every answer is ``one two three ...``, at once
or with a fixed gap."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web

USAGE: dict[str, Any] = {
    "prompt_tokens": 12,
    "completion_tokens": 4,
    "total_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 8},
    "splitserve": {"queue_s": 0.001, "prefill_s": 0.02, "handoff_s": 0.003, "decode_s": 1.5},
}


class FakeOpenAI:
    """``requests`` holds the bodies that arrived; ``gap_s`` lies between tokens; ``failing`` answers 429;
    after ``most`` answers none comes."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []  # what came as authorization
        self.gap_s = 0.0
        self.failing = False
        self.most = sys.maxsize
        self.url = ""
        self.cancelled = asyncio.Event()

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        self.keys.append(request.headers.get("authorization", ""))
        if len(self.requests) > self.most:
            await asyncio.Event().wait()
        if self.failing:
            return web.json_response(
                {
                    "error": {
                        "message": "too many requests",
                        "type": "overloaded",
                        "param": None,
                        "code": None,
                    }
                },
                status=429,
            )
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        chat = request.path.endswith("chat/completions")
        words = ["one", " two", " three", " four"] if chat else [" x"] * body["max_tokens"]
        try:
            for index, word in enumerate(words):
                choice = {"delta": {"content": word}} if chat else {"text": word}
                reason = "stop" if index == len(words) - 1 else None
                await self._send(response, {"choices": [{"index": 0, "finish_reason": reason, **choice}]})
                await asyncio.sleep(self.gap_s)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled.set()
            raise
        await self._send(response, {"choices": [], "usage": {**USAGE, "completion_tokens": len(words)}})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")


@asynccontextmanager
async def fake_openai(lists: bool = True) -> AsyncIterator[FakeOpenAI]:
    """A running server on a port that the system chose. ``lists``: it has /v1/models."""
    fake = FakeOpenAI()
    app = web.Application()
    if lists:
        app.router.add_get("/v1/models", fake.models)
    app.router.add_post("/v1/completions", fake.complete)
    app.router.add_post("/v1/chat/completions", fake.complete)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()
