"""The lifecycle's shell on a real event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from splitserve.coordinator.dispatcher import SocketDispatcher
from splitserve.coordinator.flight import Action
from splitserve.coordinator.lifecycle import Lifecycle, LifecycleLimits
from splitserve.transport.channels import DealerChannel
from splitserve.transport.coordinator_link import identity_of
from splitserve.transport.messages import FROM_COORDINATOR, Hello, ModelIdentity

DEADLINE_S = 60.0


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


async def test_a_lost_connection_is_followed_up_at_once() -> None:
    """Nothing else would tell of this worker's end: its silence is borne for hours, and it is of another host."""
    core = Lifecycle(7, "hybrid", LifecycleLimits(heartbeat_s=9000.0, dead_after_s=9000.0))
    dispatcher = SocketDispatcher(core, "tcp://127.0.0.1:*", None)
    dispatcher.start()
    model = ModelIdentity(fingerprint="m", dtype="f", block_size=4, layout="l", block_bytes=8)
    sizes = {"max_model_len": 100, "vocab_size": 10, "num_blocks": 50, "max_num_seqs": 4, "max_batch_tokens": 16}
    with DealerChannel.connect(dispatcher.address, identity_of("p", 1), None, FROM_COORDINATOR) as worker:
        worker.send(Hello(worker_id="p", incarnation=1, role="prefill", host="elsewhere", pid=1, model=model, **sizes))
        await _until(core, 1)
    await _until(core, 0)
    dispatcher.stop()
    assert "its connection is gone" in core.reasons_lost[("p", 1)]


async def _until(core: Lifecycle, num_workers: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(core.pools.workers) != num_workers:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
