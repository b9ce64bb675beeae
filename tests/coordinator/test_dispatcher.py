"""The lifecycle's shell on a real event loop."""

from __future__ import annotations

import asyncio
import subprocess
import time

import pytest
from msgspec.structs import replace
from support.adapted_bench import Adapted
from support.lifecycle_bench import Bench

from splitserve.coordinator.dispatcher import TICK_S
from splitserve.coordinator.lifecycle.actions import Action
from splitserve.coordinator.lifecycle.lifecycle import Lifecycle, LifecycleLimits
from splitserve.coordinator.lifecycle.membership import DRAINED
from splitserve.coordinator.socket_dispatcher import SocketDispatcher
from splitserve.transport.channels.channels import DealerChannel
from splitserve.transport.channels.coordinator_link import identity_of
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.fields import WIRE_VERSION
from splitserve.transport.messages.messages import (
    FROM_COORDINATOR,
    Alive,
    Goodbye,
    Hello,
    Message,
    ModelIdentity,
    OtherVersion,
    Welcome,
)
from splitserve.transport.process.host import host_identity

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
    """Nothing else would show this worker's end: its silence is tolerated for hours, and it is on another
    host."""
    core, dispatcher = _patient()
    with DealerChannel.connect(dispatcher.address, identity_of("p", 1), None, FROM_COORDINATOR) as worker:
        worker.send(_hello("elsewhere", 1))
        await _until(core, 1)
    await _until(core, 0)
    dispatcher.stop()
    assert "its connection is gone" in core.pools.reasons_lost[("p", 1)]


async def test_a_process_that_has_ended_is_given_up() -> None:
    core, dispatcher = _patient()
    with DealerChannel.connect(dispatcher.address, identity_of("p", 1), None, FROM_COORDINATOR) as worker:
        process = subprocess.Popen(["sleep", "600"])
        worker.send(_hello(host_identity(), process.pid))
        await _until(core, 1)
        process.kill()
        await _until(core, 0)
    process.wait()
    dispatcher.stop()
    assert core.counters()["workers_lost"] == 1
    assert core.pools.reasons_lost[("p", 1)] == "its process has ended"


async def test_the_last_words_of_a_process_count_that_arrive_after_its_end_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are read by another thread than the one that notices its end, and may be late."""
    core, dispatcher = _patient()
    known_to_have_ended = asyncio.Event()
    watched = dispatcher._processes._on_end
    monkeypatch.setattr(
        dispatcher._processes, "_on_end", lambda worker: (watched(worker), known_to_have_ended.set())
    )
    monkeypatch.setattr(
        "splitserve.coordinator.dispatcher.LAST_MESSAGES_S", DEADLINE_S / 2
    )  # not until its Goodbye has been read
    with DealerChannel.connect(dispatcher.address, identity_of("p", 1), None, FROM_COORDINATOR) as worker:
        process = subprocess.Popen(["sleep", "600"])
        worker.send(_hello(host_identity(), process.pid))
        await _until(core, 1)
        process.kill()
        await asyncio.wait_for(known_to_have_ended.wait(), DEADLINE_S)
        worker.send(Goodbye(worker_id="p", incarnation=1))
        await _until(core, 0)
    process.wait()
    dispatcher.stop()
    assert core.counters()["workers_lost"] == 0
    assert core.pools.reasons_lost[("p", 1)] == DRAINED
    assert dispatcher.gap() == "", "requests wait for the next one"
    assert "expected back" in dispatcher.failing()


async def test_a_worker_of_another_wire_version_is_refused_on_both_sides_and_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core, dispatcher = _patient()
    with DealerChannel.connect(dispatcher.address, identity_of("p", 1), None, FROM_COORDINATOR) as worker:
        worker.send(replace(_hello("elsewhere", 1), wire_version=WIRE_VERSION + 2))
        deadline = time.monotonic() + DEADLINE_S
        while not worker.readable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        (answer,) = worker.receive(1)
    sentence = f"wire version {WIRE_VERSION + 2} there, {WIRE_VERSION} here"
    assert answer == OtherVersion(wire_version=WIRE_VERSION)
    assert sentence in str(dispatcher.snapshot()["refused"]["p"])
    assert f"worker p is refused: {sentence}" in dispatcher.gap()
    assert f"'p': {sentence}" in caplog.text
    assert not core.pools.workers
    assert core.refused(time.monotonic() + 60.0) == {}
    dispatcher.stop()


@pytest.mark.parametrize(
    ("fact", "sentence"),
    [
        ("vocabulary", "its tokenizer.json has another vocabulary"),
        ("size", "its model has theirs, the coordinator's has ours"),
    ],
)
async def test_a_worker_of_another_model_is_refused_on_both_sides_and_shown(
    fact: str, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was taken in, and every answer was wrong text, or another model's."""
    core, dispatcher = _patient()
    setattr(core.pools, fact, "ours")
    with DealerChannel.connect(dispatcher.address, identity_of("p", 1), None, FROM_COORDINATOR) as worker:
        answers: list[Message] = []
        for name in ("theirs", "theirs", "ours"):
            worker.send(replace(_hello("elsewhere", 1), **{fact: name}))
            deadline = time.monotonic() + DEADLINE_S
            while not worker.readable:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            answers += worker.receive(1)
            if name == "theirs":
                await asyncio.sleep(2 * TICK_S)
                assert not core.pools.workers
                assert f"worker p is refused: {sentence}" in dispatcher.gap()
    assert [type(answer) for answer in answers] == [Alive, Alive, Welcome]
    assert "start both with the same --model" in getattr(answers[0], "misfit", "")
    assert caplog.text.count(f"worker p is refused: {sentence}") == 1
    dispatcher.stop()


@pytest.mark.parametrize("fact", ["vocabulary", "size"])
@pytest.mark.parametrize("names", [("", "theirs"), ("ours", "")])
def test_what_has_no_name_is_not_compared(names: tuple[str, str], fact: str) -> None:
    """A worker of an earlier version, a GGUF file."""
    core = Lifecycle(7, "hybrid")
    setattr(core.pools, fact, names[0])
    hello = replace(_hello("elsewhere", 1), **{fact: names[1]})
    core.receive(("p", 1), hello, 0.0)
    assert list(core.pools.workers) == [("p", 1)]


def _patient() -> tuple[Lifecycle, SocketDispatcher]:
    """A started dispatcher without a worker, which gives up none for its silence."""
    core = Lifecycle(7, "hybrid", LifecycleLimits(heartbeat_s=9000.0, dead_after_s=9000.0))
    dispatcher = SocketDispatcher(core, "tcp://127.0.0.1:*", None)
    dispatcher.start()
    return core, dispatcher


def _hello(host: str, pid: int) -> Hello:
    model = ModelIdentity(kv_name="m", dtype="f", block_size=4, cache_map=states(1, 8), block_bytes=8)
    sizes = {
        "max_model_len": 100,
        "vocab_size": 10,
        "num_blocks": 50,
        "max_num_seqs": 4,
        "max_batch_tokens": 16,
    }
    return Hello(worker_id="p", incarnation=1, role="prefill", host=host, pid=pid, model=model, **sizes)


async def _until(core: Lifecycle, num_workers: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(core.pools.workers) != num_workers:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_adapters_are_logged_as_they_come_and_go_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    bench = Adapted()
    bench.core.pools.adapters.taken = frozenset({"base"})
    dispatcher = SocketDispatcher(bench.core, "tcp://127.0.0.1:*", None)
    with caplog.at_level("INFO"):
        for adapters in (["sql:A", "base:B"], ["sql:A", "base:B", "poet:C"], [":A", "poet:C"]):
            for name in ("p", "d"):
                bench.report(name, *adapters)
            dispatcher._note_changes()
    assert [line for line in caplog.messages if "adapter" in line or "base" in line] == [
        "adapters that requests may name: sql",
        "not served, for the model itself has the name: base",
        "adapters that requests may name: poet",
        "adapters that no pair of workers has any more: sql",
    ]
    system, state = dispatcher.system(), dispatcher.snapshot()
    dispatcher.stop()
    assert (system.num_adapters, [list(worker.adapters) for worker in system.workers]) == (
        1,
        [["poet"], ["poet"], [], []],
    )
    assert state["adapters"] == {"poet": "C"}


async def test_room_and_the_queues_end_are_seen_at_once() -> None:
    """Routes look for a model with room; a shadow's copy is dropped where it would wait."""
    bench = Bench(max_num_seqs=1, max_queue=1)
    dispatcher = SocketDispatcher(bench.core, "tcp://127.0.0.1:*", None)
    states = []
    for name in ("running", "waiting"):
        assert dispatcher.full() == ""
        bench.submit(name)
        states.append(bench.core.requests[name].state)
    assert states == ["prefill", "queue"]
    assert dispatcher.full() == "1 requests are waiting already"
    dispatcher.cancel("waiting")
    assert dispatcher.full() == ""
    dispatcher.stop()
