"""A word that lets the peer read or reuse blocks waits until no put of that lease is writing them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import zmq
from support.kv_pools import filled_pool
from support.messages import SPEC

from splitserve.transport.actions import CancelPuts, Put, SendHandoff, SendPlaced, ToPeer
from splitserve.transport.handoff_sender import HandoffSender
from splitserve.transport.messages import Handoff, Meet, Message, ModelIdentity, Placed, Release, Renew, u64
from splitserve.transport.movers.interface import Arrival, Item, Pool
from splitserve.transport.sending_end import SendingEnd

PEER = ("d0", 1)
MODEL = ModelIdentity(fingerprint="f", dtype="float32", block_size=16, layout="l", block_bytes=1)


class Blocks:
    pool: Pool = filled_pool(8)
    num_layers = 4
    device_blocks = None

    def fetch(self, blocks: Sequence[int], first_layer: int = 0, num_layers: int | None = None) -> None:
        """They are there."""


class SlowMover:
    """Writes the peer's memory by itself, until the test says that it has."""

    def __init__(self) -> None:
        self.under_way: list[Arrival] = []
        self.done: list[Arrival] = []

    def put(self, lease: int, secret: bytes, items: Sequence[Item], first_layer: int = 0, num_layers: int | None = None) -> None:
        self.under_way += [(lease, position) for position, _, _ in items]

    def finish(self, lease: int) -> None:
        self.done += [arrival for arrival in self.under_way if arrival[0] == lease]
        self.under_way = [arrival for arrival in self.under_way if arrival[0] != lease]

    def poll(self) -> list[Arrival]:
        done, self.done = self.done, []
        return done

    def pending(self) -> int:
        return len(self.under_way)

    def writing(self, lease: int) -> bool:
        return any(arrival[0] == lease for arrival in self.under_way)

    def cancel(self, lease: int) -> None:
        """It cannot be called back."""

    def close(self) -> None:
        self.under_way.clear()


class Channel:
    socket = object()

    def __init__(self) -> None:
        self.said: list[Message] = []

    def send(self, *messages: Message) -> bool:
        self.said += messages
        return True


@pytest.fixture
def end() -> SendingEnd:
    meet = Meet(worker_id="p", incarnation=1, host="h", pid=1, model=MODEL, movers=("nixl",))
    end = SendingEnd(HandoffSender(meet), "p", 1, None, Blocks(), zmq.Poller(), True)
    end._channels[PEER] = Channel()  # type: ignore[assignment]
    end._movers[PEER] = SlowMover()
    return end


def said(end: SendingEnd) -> list[type[Message]]:
    end.receive(set(), 0.0)
    return [type(message) for message in end._channels[PEER].said]  # type: ignore[attr-defined]


def test_words_about_blocks_wait_for_their_lease_and_others_do_not(end: SendingEnd) -> None:
    mover = end._movers[PEER]
    assert isinstance(mover, SlowMover)
    end.carry_out(Put(PEER, 1, b"s" * 16, [(0, 1, 1), (1, 2, 2)]))
    end.carry_out(Put(PEER, 2, b"s" * 16, [(0, 3, 3)]))
    end.carry_out(SendPlaced(PEER, 1, 0, [1, 2]))
    end.carry_out(SendHandoff(PEER, SPEC, 1, 5, None, [1, 2]))
    end.carry_out(CancelPuts(PEER, 2))
    end.carry_out(ToPeer(PEER, Release(lease=2, coordinator=1, dispatch=2)))
    end.carry_out(ToPeer(PEER, Renew(leases=u64([1]))))
    assert said(end) == [Renew]
    mover.finish(2)
    assert said(end) == [Renew, Release]
    mover.finish(1)
    assert said(end) == [Renew, Release, Placed, Handoff]


def test_of_a_lease_that_nobody_writes_it_speaks_at_once(end: SendingEnd) -> None:
    end.carry_out(Put(PEER, 1, b"s" * 16, [(0, 1, 1)]))
    end.carry_out(ToPeer(PEER, Release(lease=7, coordinator=1, dispatch=2)))
    assert said(end) == [Release]
