"""An event loop receives every message of a channel, and a thread wakes a poll."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack

import zmq
from support.channels import DEADLINE_S, HELLO, dealer, router

from splitserve.transport.channels.event_loop import BUDGET, Attachment
from splitserve.transport.messages.messages import Cancel, RequestFailed, u32
from splitserve.transport.process.wakeup import Wakeup


async def test_an_event_loop_hears_every_message(stack: ExitStack) -> None:
    """A flood over several budgets, answered one by one from the callback: no edge is lost."""
    server = router(stack)
    worker = dealer(stack, server.address)
    total, received, answers = 3 * BUDGET + 5, 0, 0
    done = asyncio.Event()

    def on_worker_messages(messages: list[tuple[bytes, RequestFailed]]) -> None:
        nonlocal received
        received += len(messages)
        for identity, message in messages:
            server.send(identity, Cancel(coordinator=1, dispatches=u32([message.dispatch])))

    def on_coordinator_messages(messages: list[Cancel]) -> None:
        nonlocal answers
        answers += len(messages)
        if answers == total:
            done.set()

    loop = asyncio.get_running_loop()
    at_server, at_worker = (
        Attachment(loop, server, on_worker_messages),
        Attachment(loop, worker, on_coordinator_messages),
    )
    for start in range(0, total, 100):
        for dispatch in range(start, min(total, start + 100)):
            worker.send(RequestFailed(coordinator=1, dispatch=dispatch, kind="internal", message=""))
        await asyncio.sleep(0.001)
    await asyncio.wait_for(done.wait(), DEADLINE_S)
    at_server.close(), at_worker.close()
    assert received == answers == total


async def test_what_has_been_closed_is_called_no_more(stack: ExitStack) -> None:
    server, received = router(stack), list[object]()
    dealer(stack, server.address).send(HELLO)
    assert server.socket.poll(DEADLINE_S * 1000)
    Attachment(asyncio.get_running_loop(), server, received.append).close()  # its first look was due
    for _ in range(3):
        await asyncio.sleep(0)
    assert received == []
    assert len(server.receive(10)) == 1


async def test_an_event_loop_goes_on_after_an_error_in_the_callback(stack: ExitStack) -> None:
    server = router(stack)
    worker = dealer(stack, server.address)
    loop = asyncio.get_running_loop()
    errors: list[object] = []
    received = asyncio.Event()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def callback(messages: list[tuple[bytes, RequestFailed]]) -> None:
        if messages[-1][1].kind == "internal":
            raise RuntimeError("first")
        received.set()

    attachment = Attachment(loop, server, callback)
    worker.send(HELLO)
    while not errors:
        await asyncio.sleep(0.002)
    worker.send(RequestFailed(coordinator=1, dispatch=2, kind="deadline", message=""))
    await asyncio.wait_for(received.wait(), DEADLINE_S)
    attachment.close()


def test_a_wakeup_ends_a_poll_from_another_thread() -> None:
    wakeup = Wakeup()
    poller = zmq.Poller()
    poller.register(wakeup.fd, zmq.POLLIN)
    wakeup.clear()
    other = threading.Timer(0.02, wakeup.set)
    other.start()
    assert poller.poll(DEADLINE_S * 1000)
    other.join()
    wakeup.set(), wakeup.clear()
    assert not poller.poll(0)
    wakeup.close()
