"""A word that lets the peer read or reuse blocks waits until no put of that lease is writing them."""

from __future__ import annotations

import time

import pytest
from support.messages import SPEC
from support.sending_end import PEER, Reached, SlowMover, sent

from splitserve.transport.errors import MoverError, PeerEnded
from splitserve.transport.handoff.protocol import (
    CancelPuts,
    Put,
    SendHandoff,
    SendPlaced,
    ToPeer,
    Undelivered,
)
from splitserve.transport.handoff.sending_end import SendingEnd
from splitserve.transport.messages.messages import (
    Handoff,
    Message,
    Met,
    Placed,
    Release,
    Renew,
    SessionOver,
    u64,
)
from splitserve.transport.movers.interface import Arrival


def test_words_about_blocks_wait_for_their_lease_and_others_do_not(end: SendingEnd) -> None:
    mover = end._movers[PEER]
    assert isinstance(mover, SlowMover)
    handoff = Handoff(spec=SPEC, lease=1, token=5, checksums=b"")
    end.carry_out(Put(PEER, 1, b"s" * 16, [(0, 1, 1), (1, 2, 2)]))
    end.carry_out(Put(PEER, 2, b"s" * 16, [(0, 3, 3)]))
    end.carry_out(SendPlaced(PEER, 1, 0, [1, 2]))
    end.carry_out(SendHandoff(PEER, 1, handoff, [1, 2]))
    end.carry_out(CancelPuts(PEER, 2))
    end.carry_out(ToPeer(PEER, Release(lease=2, coordinator=1, dispatch=2)))
    end.carry_out(ToPeer(PEER, Renew(leases=u64([1]))))
    assert sent(end) == [Renew]
    mover.finish(2)
    assert sent(end) == [Renew, Release]
    mover.finish(1)
    assert sent(end) == [Renew, Release, Placed, Handoff]


def test_of_a_lease_that_nobody_writes_it_speaks_at_once(end: SendingEnd) -> None:
    end.carry_out(Put(PEER, 1, b"s" * 16, [(0, 1, 1)]))
    end.carry_out(ToPeer(PEER, Release(lease=7, coordinator=1, dispatch=2)))
    assert sent(end) == [Release]


class TalkingMover(SlowMover):
    fails = is_closed = False

    def poll(self) -> list[Arrival]:
        if self.fails:
            raise MoverError("broken by a test")
        return super().poll()

    def receive(self, message: Message) -> None:
        """Ignored."""

    def take_messages(self) -> list[Message]:
        return [SessionOver(session=1, reason="closed")] if self.is_closed else []

    def close(self) -> set[int]:
        self.is_closed = True
        return super().close()


def test_a_movers_last_words_are_said_when_it_is_closed(end: SendingEnd) -> None:
    end._movers[PEER] = mover = TalkingMover()
    mover.fails = True
    assert sent(end) == [SessionOver]
    assert end._movers == {}


def test_of_what_may_still_land_when_its_mover_is_closed_nothing_is_said_any_more(end: SendingEnd) -> None:
    """The peer would give those blocks to others."""
    end._movers[PEER] = mover = TalkingMover()
    end.carry_out(Put(PEER, 1, b"s" * 16, [(0, 1, 1)]))
    end.carry_out(Put(PEER, 2, b"s" * 16, [(0, 1, 2)]))
    mover.finish(2)
    mover.fails = True
    assert sent(end) == [SessionOver]
    for lease in (1, 2):
        end.carry_out(ToPeer(PEER, Release(lease=lease, coordinator=1, dispatch=2)))
    messages = end._channels[PEER].sent  # type: ignore[attr-defined]
    assert [message.lease for message in messages if isinstance(message, Release)] == [2]


class BrokenMover(SlowMover):
    def __init__(self, error: MoverError) -> None:
        super().__init__()
        self._error = error

    def poll(self) -> list[Arrival]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "num_fallbacks"), [(MoverError("broken"), 1), (PeerEnded("its process has ended"), 0)], ids=repr
)
def test_a_peer_that_has_ended_is_no_fault_of_its_mover(error: MoverError, num_fallbacks: int) -> None:
    reached = Reached()
    reached.sender.receive(PEER, Met(worker_id="d0", incarnation=1, mover="shm", num_blocks=8), 0.0)
    reached.end._movers[PEER] = BrokenMover(error)
    reached.end.receive(set(), time.monotonic())
    (undelivered,) = reached.act()
    assert isinstance(undelivered, Undelivered)
    assert str(error) in undelivered.message
    assert reached.sender.num_fallbacks == num_fallbacks
    assert reached.end._movers == {}
    reached.end.close()
    reached.router.close()
