"""The lifecycle's shell on a real event loop."""

from __future__ import annotations

import asyncio

import pytest

from splitserve.coordinator.dispatcher import SocketDispatcher
from splitserve.coordinator.flight import Action
from splitserve.coordinator.lifecycle import Lifecycle

DEADLINE_S = 10.0


async def test_one_tick_that_raises_does_not_end_all_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Lifecycle(7, "hybrid")
    errors: list[object] = []
    ticked = asyncio.Event()

    def tick(now: float) -> list[Action]:
        if not errors:
            raise RuntimeError("a mistake of ours")
        ticked.set()
        return []

    monkeypatch.setattr(core, "tick", tick)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    dispatcher = SocketDispatcher(core, "tcp://127.0.0.1:*", None)
    asyncio.get_running_loop().call_soon(dispatcher.start)  # the first tick is made at once
    await asyncio.wait_for(ticked.wait(), DEADLINE_S)
    dispatcher.stop()
    assert [str(error) for error in errors] == ["a mistake of ours"]
