"""The dispatcher on timers, a socket and a process watch that the test turns by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.lifecycle_bench import Bench, Sink

from splitserve.coordinator.dispatcher import LifecycleDispatcher
from splitserve.coordinator.lifecycle.actions import End, Push, Send
from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.transport.channels.coordinator_link import identity_of, worker_of
from splitserve.transport.messages.messages import (
    Alive,
    Cancel,
    Goodbye,
    Hello,
    Joined,
    Load,
    Message,
    SamplingParams,
    u32,
)

ALIVE, CANCEL = Alive(coordinator=7), Cancel(coordinator=7, dispatches=u32([1]))
P, D = ("p", 1), ("d", 1)


class Turned:
    """Everything that a dispatcher touches."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], object]] = []
        self.later: list[Callable[[], object]] = []
        self.arrived: list[tuple[bytes, Message]] = []
        self.sent: list[tuple[str, str]] = []
        self.cannot_send_to = ""

    def now(self) -> float:
        return 0.0

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        self.soon.append(lambda: callback(*args))

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: object) -> Turned:
        self.later.append(lambda: callback(*args))
        return self

    def cancel(self) -> None: ...
    def watch(self, hello: Hello) -> None: ...
    def forget(self, worker: tuple[str, int]) -> None: ...

    def reach(self, peer: bytes, *messages: Message) -> bool:
        worker = worker_of(peer)
        assert worker is not None
        if worker[0] == self.cannot_send_to:
            raise UnicodeEncodeError("utf-8", "", 0, 0, "a mistake of ours")
        self.sent += [(worker[0], type(message).__name__) for message in messages]
        return True

    def receive(self, limit: int) -> list[tuple[bytes, Message]]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def lost_any(self) -> bool:
        return False

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for call in soon:
            call()


class LeavingSink(Sink):
    """Its client leaves in the middle of the first token."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.leave: Callable[[], None] = lambda: None

    def push(self, token_id: int, logprobs: object) -> None:
        self.leave()
        self.seen.append(token_id)

    def end(self, ended: object) -> None:
        self.seen.append("end")


def made(bench: Bench | None = None) -> tuple[Bench, Turned, LifecycleDispatcher]:
    bench, turned = bench or Bench(), Turned()
    return bench, turned, LifecycleDispatcher(bench.core, turned, turned, turned)


def load(name: str) -> Message:
    blocks = {"blocks_free": 50, "blocks_cached": 0, "blocks_used": 0, "blocks_leased": 0}
    work = {"num_running": 0, "num_waiting": 0, "num_waiting_tokens": 0, "steps": 0, "busy": False}
    return Load(
        worker_id=name, incarnation=1, accepting=True, draining=False, dispatches=b"", **blocks, **work
    )


def test_what_a_sink_asks_for_comes_after_what_is_being_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's end came before tokens that were pushed with it, and a Cancel before its Prefill."""
    bench, turned, dispatcher = made()
    sink = LeavingSink()
    request = Request("r", [1], SamplingParams(max_tokens=3, temperature=0.0), sink, 0.0, 60.0)
    monkeypatch.setattr(
        bench.core, "submit", lambda *_: [Push(request, 5, None), Push(request, 6, None), Send(P, ALIVE)]
    )
    monkeypatch.setattr(bench.core, "cancel", lambda *_: [Send(P, CANCEL), End(request, Ended())])

    def leave_once() -> None:
        sink.leave = lambda: None
        dispatcher.cancel("r")

    sink.leave = leave_once
    dispatcher.submit(request)
    turned.turn()
    assert sink.seen == [5, 6, "end"]
    assert turned.sent == [("p", "Alive"), ("p", "Cancel")]


def test_a_worker_that_has_left_is_sent_nothing_but_that() -> None:
    _, turned, dispatcher = made()
    goodbye = Goodbye(worker_id="d", incarnation=1)
    dispatcher.receive(
        [(identity_of(*D), load("d")), (identity_of(*P), load("p")), (identity_of(*D), goodbye)]
    )
    turned.turn()
    assert turned.sent == [("d", "Fenced"), ("p", "Alive")]
    dispatcher.receive([(identity_of(*D), goodbye)])  # the answer was lost
    turned.turn()
    assert turned.sent[2:] == [("d", "Fenced")]


def test_a_message_that_the_lifecycle_fails_on_takes_no_others_tokens_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lifecycle counted them as the client's, and they were never written."""
    bench, _, dispatcher = made()
    sink = LeavingSink()
    dispatcher.submit(Request("r", [1], SamplingParams(max_tokens=3, temperature=0.0), sink, 0.0, 60.0))
    receive = bench.core.receive

    def failing(worker: tuple[str, int], message: Message, now: float) -> object:
        if worker == P:
            raise RuntimeError("a mistake of ours")
        return receive(worker, message, now)

    monkeypatch.setattr(bench.core, "receive", failing)
    joined = Joined(coordinator=7, dispatch=1, token=5, index=0)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        dispatcher.receive([(identity_of(*D), joined), (identity_of(*P), load("p"))])
    assert sink.seen == [5]


def test_a_worker_that_has_ended_is_removed_though_its_last_messages_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its silence meant nothing any more, and nothing else would have removed it."""
    bench, turned, dispatcher = made()
    dispatcher.process_ended(D)
    monkeypatch.setattr(bench.core, "receive", None)
    turned.arrived = [(identity_of(*D), load("d"))]
    with pytest.raises(TypeError):
        turned.later.pop()()
    assert D not in bench.core.pools.workers


def test_messages_that_cannot_be_sent_hold_up_no_others(caplog: pytest.LogCaptureFixture) -> None:
    _, turned, dispatcher = made()
    turned.cannot_send_to = "p"
    dispatcher.receive([(identity_of(*P), load("p")), (identity_of(*D), load("d"))])
    turned.turn()
    assert turned.sent == [("d", "Alive")]
    assert "1 messages to worker p cannot be sent" in caplog.text
