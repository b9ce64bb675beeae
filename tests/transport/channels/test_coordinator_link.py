"""A worker's line to its coordinator: a coordinator that falls silent, comes back, or is another one."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import zmq

from splitserve.transport.channels import channels
from splitserve.transport.channels.channels import RouterChannel
from splitserve.transport.channels.coordinator_link import CoordinatorLink
from splitserve.transport.live_environment import LiveNetwork
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import (
    FROM_WORKER,
    Alive,
    Fenced,
    Hello,
    Message,
    ModelIdentity,
    OtherVersion,
    Welcome,
)

MODEL = ModelIdentity(kv_name="f", dtype="float32", block_size=16, cache_map=states(1, 64), block_bytes=64)


class Worker:
    """Notes the calls of its link."""

    def __init__(self) -> None:
        self.noted: list[object] = []
        self.alone = True

    def hello(self, incarnation: int) -> Hello:
        numbers = {
            "max_model_len": 9,
            "vocab_size": 9,
            "num_blocks": 9,
            "max_num_seqs": 9,
            "max_batch_tokens": 9,
        }
        return Hello(
            worker_id="w", incarnation=incarnation, role="decode", host="h", pid=1, model=MODEL, **numbers
        )

    def welcomed(self, coordinator: int) -> None:
        self.noted.append(("welcomed", coordinator))

    def fenced(self, incarnation: int) -> None:
        self.noted.append(("fenced", incarnation))

    def orphaned(self) -> None:
        self.noted.append("orphaned")

    def learn_addresses(self, addresses: Sequence[str]) -> None:
        if addresses:
            self.noted.append(list(addresses))


class Line:
    """A worker, its link, and the coordinator's socket; the clock is the test's."""

    def __init__(self) -> None:
        self.router = RouterChannel.bind("tcp://127.0.0.1:*", None, FROM_WORKER)
        self.worker, self.now = Worker(), 0.0
        counter = itertools.count(6)
        network = LiveNetwork(None, zmq.Poller())
        self.link = CoordinatorLink(
            self.router.address, network, "w", self.worker, 5, lambda: next(counter), orphaned_after_s=10.0
        )

    def receive_hello(self) -> bytes:
        """The identity that the worker's Hello came from."""
        self.link.tick(self.now)
        assert self.router.socket.poll(60_000)
        ((identity, message),) = self.router.receive(10)
        assert isinstance(message, Hello)
        return identity

    def send(self, identity: bytes, message: Message) -> None:
        self.router.send(identity, message)
        assert isinstance(self.link.socket, zmq.Socket)
        assert self.link.socket.poll(60_000)
        assert self.link.receive(self.now) == []


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.link.close()
    line.router.close()


def later(line: Line, seconds: float, do: Callable[[], None] = lambda: None) -> None:
    line.now += seconds
    do()
    line.link.tick(line.now)


def test_what_nobody_owns_is_freed_within_the_time_and_the_worker_serves_again_at_once(line: Line) -> None:
    identity = line.receive_hello()
    line.send(identity, Welcome(coordinator=1, heartbeat_s=0.2))
    for _ in range(5):
        later(line, 9.0, lambda: line.send(identity, Alive(coordinator=1)))
    assert line.worker.noted == [("welcomed", 1)]
    later(line, 10.0)
    assert line.worker.noted == [("welcomed", 1), "orphaned"]
    line.send(line.receive_hello(), Welcome(coordinator=2, heartbeat_s=0.2))
    assert (line.link.coordinator, line.worker.noted[-1]) == (2, ("welcomed", 2))


def test_a_fenced_worker_says_hello_as_another_incarnation(line: Line) -> None:
    identity = line.receive_hello()
    line.send(identity, Fenced(coordinator=1, reason="late"))
    assert line.worker.noted == [("fenced", 6)]
    assert line.receive_hello() != identity


def test_a_worker_that_fits_no_other_says_so_in_its_own_log_once(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    identity = line.receive_hello()
    sentence = (
        "this decode worker gets no work: its dtype is not that of p0 ('float32' here, 'bfloat16' there)"
    )
    for misfit in (sentence, sentence, "", ""):
        alive = Alive(coordinator=1, misfit=misfit)
        later(line, 3.0, partial(line.send, identity, alive))
    sent = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert sent == [("WARNING", sentence), ("INFO", "there is a worker of the other role that this one fits")]


def test_a_worker_of_another_wire_version_learns_why_it_is_not_welcomed_and_keeps_asking(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    identity = line.receive_hello()
    for _ in range(10):
        line.send(identity, OtherVersion(wire_version=7))
        later(line, 1.0)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "wire version 7 there" in warning
    assert "upgrade this process" in warning
    line.send(identity, Welcome(coordinator=1, heartbeat_s=0.2))
    assert line.worker.noted == [("welcomed", 1)]


def test_a_tunnel_that_ends_each_connection_does_not_use_the_link_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link did not read its socket's monitor. After a thousand connections that queue was full, ZeroMQ's
    thread waited for room, and the worker could not connect until it was started anew."""
    monkeypatch.setattr(channels, "RECONNECT_MS", 1)
    with socket.create_server(("127.0.0.1", 0)) as tunnel:
        tunnel.settimeout(10.0)
        address = f"tcp://127.0.0.1:{tunnel.getsockname()[1]}"
        link = CoordinatorLink(
            address, LiveNetwork(None, zmq.Poller()), "w", Worker(), 5, lambda: 6, orphaned_after_s=10.0
        )
        for number in range(2100):
            tunnel.accept()[0].close()
            link.tick(number / 100)
        link.close()


def received(line: Line) -> list[str]:
    """The names of the messages that come now, at least one."""
    assert line.router.socket.poll(60_000)
    return [type(message).__name__ for _, message in line.router.receive(10)]


def test_goodbye_is_said_until_it_is_answered(line: Line) -> None:
    """One that was sent while the connection ended was lost: the worker seemed to have died."""
    identity = line.receive_hello()
    line.send(identity, Welcome(coordinator=1, heartbeat_s=0.2))
    line.link.leave(line.now)
    assert received(line) == ["Goodbye"]
    later(line, 0.05)
    line.send(identity, Alive(coordinator=1))  # of before
    later(line, 0.06)
    assert (received(line), line.link.has_left) == (["Goodbye"], False)
    line.send(identity, Fenced(coordinator=1, reason="it has left"))
    assert line.link.has_left
    for _ in range(3):
        later(line, 5.0)
    assert line.router.socket.poll(50) == 0  # neither Goodbye nor Hello
    assert (line.link.coordinator, line.worker.noted) == (None, [("welcomed", 1)])


def test_no_answer_is_awaited_of_a_coordinator_that_has_not_welcomed_the_worker(line: Line) -> None:
    """Its Welcome may be on the way: it took the worker in, and then found it dead."""
    line.receive_hello()
    line.link.leave(line.now)
    assert received(line) == ["Goodbye"]
    later(line, 5.0)
    assert line.link.has_left
    assert line.router.socket.poll(50) == 0
