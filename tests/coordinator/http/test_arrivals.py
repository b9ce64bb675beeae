"""Requests that arrive in one turn of the event loop go through their stages together, and are none of each
other's business."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.errors import Headers
from splitserve.coordinator.generate.exchange import MAX_PER_TURN, HttpExchange
from splitserve.coordinator.generate.plan import MANY_CHOICES
from splitserve.coordinator.generate.prompts import INLINE_CHARS
from splitserve.coordinator.http.inner_call import InnerCall
from splitserve.coordinator.lifecycle.request import Request
from splitserve.coordinator.server import HttpApp
from splitserve.coordinator.tenants.limits import ANONYMOUS
from splitserve.coordinator.text.served_model import ServedModel

SHORT: dict[str, Any] = {"prompt": "the quick brown fox", "max_tokens": 4}
LONG = {**SHORT, "prompt": "x" * (INLINE_CHARS + 1)}


class Client:
    """Begins a request; receives its answer."""

    def __init__(self, app: HttpApp, body: dict[str, Any]) -> None:
        self.status = 0
        self.answer: dict[str, Any] = {}
        self.received = asyncio.Event()
        self.call = InnerCall(
            app.generation, "/v1/completions", json.dumps(body).encode(), ANONYMOUS, self, {}
        )
        self.call.begin()

    def answered(self, status: int, headers: Headers, body: bytes) -> None:
        self.status, self.answer = status, json.loads(body)
        self.received.set()

    def streamed(self, data: bytes, *, last: bool) -> None: ...


async def test_each_gets_its_own_answer(dispatcher: FakeDispatcher, model: ServedModel) -> None:
    app = HttpApp(dispatcher, model)
    bodies = [
        SHORT,
        {**SHORT, "n": "two"},
        LONG,
        {**SHORT, "max_tokens": 10**6},
        {**SHORT, "n": 2},
        {**SHORT, "model": "other"},
        SHORT,
    ]
    clients = [Client(app, body) for body in bodies]
    gone = Client(app, SHORT)
    gone.call.abandon()
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.received.wait() for client in clients))
    assert [client.status for client in clients] == [200, 400, 200, 400, 200, 404, 200]
    assert clients[1].answer["error"]["param"] == "n"
    assert [len(client.answer["choices"]) for client in clients if client.status == 200] == [1, 1, 2, 1]
    assert len(dispatcher.requests) == 5, "one a choice, and none for who had gone"
    assert app.metrics.num_open == 0


async def test_a_mistake_of_ours_is_one_request_s(
    dispatcher: FakeDispatcher, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = dispatcher.submit

    def mistaken(request: Request) -> None:
        assert request.priority != 7
        submit(request)

    monkeypatch.setattr(dispatcher, "submit", mistaken)
    app = HttpApp(dispatcher, model)
    clients = [Client(app, {**SHORT, "priority": priority}) for priority in (0, 7, 0)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(client.received.wait() for client in clients))
    assert [client.status for client in clients] == [200, 500, 200]


async def test_requests_for_many_choices_take_turns(
    dispatcher: FakeDispatcher, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams are served between some of the choices that are made, and between some that a client gives
    up."""
    in_a_turn: Counter[str] = Counter()
    most: Counter[str] = Counter()

    def count(kind: str, counted: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            in_a_turn[kind] += 1
            most[kind] = max(most[kind], in_a_turn[kind])
            return counted(*arguments)

        return call

    def next_turn() -> None:
        in_a_turn.clear()
        asyncio.get_running_loop().call_soon(next_turn)

    monkeypatch.setattr(HttpExchange, "_make_request", count("made", HttpExchange._make_request))
    monkeypatch.setattr(dispatcher, "cancel", count("cancelled", dispatcher.cancel))
    dispatcher.hold = True
    app = HttpApp(dispatcher, model)
    next_turn()
    clients = [Client(app, {**SHORT, "prompt": ["a"] * 3, "n": 100}) for _ in range(3)]
    await dispatcher.until(lambda: len(dispatcher.running) == 900)
    for client in clients:
        client.call.abandon()
    await dispatcher.until(lambda: not dispatcher.running)
    assert most["made"] <= 3 * MANY_CHOICES
    assert most["cancelled"] <= 3 * MAX_PER_TURN
