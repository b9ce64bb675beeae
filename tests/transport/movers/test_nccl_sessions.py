"""What the two ends of the mover nccl decide, without communicators, threads or clocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from splitserve.transport.errors import MoverError
from splitserve.transport.messages.messages import (
    Message,
    ParcelComing,
    PeerId,
    RendezvousEntry,
    SessionOver,
    u32,
)
from splitserve.transport.movers import lease_book, nccl
from splitserve.transport.movers.nccl import NcclSource, NcclTarget, Session
from splitserve.transport.movers.parcel_source import Parcel

WRITER, SECRET = ("p0", 7), b"0123456789abcdef"
NUM_LAYERS, LAYER_BYTES, WHOLE = 4, 10, slice(0, 4)


def sending(number: int = 1) -> NcclSource:
    source = NcclSource(
        b"cpu", "cpu", cast(Any, None), (40, NUM_LAYERS, LAYER_BYTES), lambda *_: cast(Any, End())
    )
    source.number = number
    return source


def items(*positions: int) -> list[tuple[int, int, int]]:
    return [(position, 10 + position, 20 + position) for position in positions]


class End:
    """An end of a communicator: what it got."""

    hangs = False

    def __init__(self) -> None:
        self.entries: list[tuple[str, bytes]] = []
        self.torn_down: list[bool] = []

    def tear_down(self) -> None:
        self.torn_down.append(True)

    def take_entry(self, key: str, value: bytes) -> None:
        self.entries.append((key, value))

    def join(self, seconds: float) -> None: ...


class Receiving:
    """The receiving end, with a lease for three blocks."""

    def __init__(self) -> None:
        self.written: list[int] | None = None
        memory = SimpleNamespace(unpack=self._write)
        self.target = NcclTarget("cpu", cast(Any, memory), (40, NUM_LAYERS, LAYER_BYTES), self._make_end)
        self.target.open(9, SECRET, {0: 20, 1: 21, 2: 22})
        self.begun: list[Session] = []
        self.target.address(WRITER)

    def _make_end(self, rank: int, send_entry: Any, *_: Any) -> Any:
        (session,) = send_entry.args
        self.begun.append(session)
        return End()

    def _write(self, packed: Any, blocks: list[int], layers: slice) -> None:
        assert self.target._lock._is_owned()  # type: ignore[attr-defined]  # ``close`` waits for it
        self.written = blocks

    def receive(self, *messages: Message, peer: PeerId = WRITER) -> list[Session]:
        """The sessions that end with these messages."""
        for message in messages:
            self.target.receive(peer, message)
        ended = [session for session in self.begun if end_of(session).torn_down]
        for session in ended:
            assert session.is_over
            end_of(session).torn_down.remove(True)  # once
        return ended

    def begin(self, number: int = 1, peer: PeerId = WRITER) -> Session:
        before = len(self.begun)
        self.receive(entry(number), peer=peer)
        (begun,) = self.begun[before:]
        return begun

    def receives(self, session: Session) -> list[int] | None:
        """The blocks that the next parcel is written into."""
        self.written = None
        self.target.received(session, cast(Any, None))
        return self.written


def end_of(session: Session | NcclSource) -> End:
    return cast(End, session.end)


@pytest.fixture
def receiving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiving]:
    monkeypatch.setattr(lease_book, "PARCEL_BYTES", 80)
    monkeypatch.setattr(nccl, "PARCEL_BYTES", 80)
    receiving = Receiving()
    yield receiving
    receiving.target.close_all()


def entry(session: int) -> RendezvousEntry:
    return RendezvousEntry(session=session, key="0", value=b"here")


def coming(
    number: int, positions: Sequence[int], session: int = 1, lease: int = 9, layers: tuple[int, int] = (0, 4)
) -> ParcelComing:
    first, count = layers[0], layers[1] - layers[0]
    return ParcelComing(
        session=session,
        number=number,
        lease=lease,
        secret=SECRET,
        first_layer=first,
        num_layers=count,
        positions=u32(positions),
    )


def over(words: list[tuple[PeerId, Message]]) -> list[tuple[PeerId, int]]:
    return [(peer, message.session) for peer, message in words if isinstance(message, SessionOver)]


def test_parcels_are_announced_at_once_and_leave_in_that_order() -> None:
    session = sending()
    session.put(9, SECRET, items(0, 1))
    session.put(9, SECRET, items(2))
    assert [(m.number, m.session) for m in session.take_messages() if isinstance(m, ParcelComing)] == [
        (0, 1),
        (1, 1),
    ]
    first = session.next()
    assert (first, session.pending()) == (Parcel(9, SECRET, (0, 1), [10, 11], WHOLE), 3)
    assert (session.poll(), session.pending()) == ([], 3)
    session.left(first)
    assert (session.poll(), session.pending()) == ([(9, 0), (9, 1)], 1)
    assert session.next() == Parcel(9, SECRET, (2,), [12], WHOLE)
    assert session.next() is None


def test_what_is_cancelled_leaves_and_is_not_told_of() -> None:
    session = sending()
    session.put(8, SECRET, items(0))
    session.put(9, SECRET, items(1))
    for _ in range(2):
        parcel = session.next()
        assert parcel is not None
        session.left(parcel)
    session.cancel(8)
    assert session.poll() == [(9, 1)]


def test_a_communicator_that_hangs_is_given_up() -> None:
    session = sending()
    assert session.poll() == []
    end_of(session).hangs = True
    with pytest.raises(MoverError, match="hangs"):
        session.poll()
    closed = sending()
    closed.close()
    end_of(closed).hangs = True
    assert closed.poll() == [], "nobody waits for it"


def test_a_session_that_has_failed_sends_nothing_more_and_says_why() -> None:
    session = sending(5)
    session.put(9, SECRET, items(0))
    session.receive(SessionOver(session=4, reason="another's"))
    assert session.poll() == []
    session.receive(SessionOver(session=5, reason="announcements were lost"))
    session.fail("what followed from that")
    assert session.next() is None
    for use in (lambda: session.poll(), lambda: session.put(9, SECRET, items(1))):
        with pytest.raises(MoverError, match="announcements were lost"):
            use()


def test_the_other_end_hears_that_a_session_is_closed() -> None:
    session = sending(5)
    session.put(9, SECRET, items(0))
    session.close()
    session.close()
    assert [(type(word), getattr(word, "session", 0)) for word in session.take_messages()] == [
        (SessionOver, 5)
    ]
    assert (session.pending(), session.is_over) == (0, True)


def test_only_its_own_entries_are_for_the_communicator() -> None:
    session = sending(5)
    session.receive(entry(4))
    assert end_of(session).entries == []
    session.receive(entry(5))
    assert end_of(session).entries == [("0", b"here")]
    session.send_entry("0", b"here")
    assert session.take_messages() == [entry(5)]


def test_the_first_word_begins_a_session_and_parcels_come_in_order(receiving: Receiving) -> None:
    assert receiving.receive(entry(1), coming(0, [0]), coming(1, [2, 1])) == []
    (session,) = receiving.begun
    assert end_of(session).entries == [("0", b"here")]
    assert receiving.receives(session) == [20]
    assert receiving.target.poll(9) == [(9, 0)]
    assert receiving.receives(session) == [22, 21]


def test_a_parcel_whose_lease_has_ended_is_received_and_written_nowhere(receiving: Receiving) -> None:
    session = receiving.begin()
    receiving.receive(coming(0, [0]), coming(1, [1], lease=8), coming(2, [2]))
    receiving.target.close(9)
    assert [receiving.receives(session) for _ in range(3)] == [None, None, None]
    assert receiving.target.dropped == {"lease": 1}


def test_what_an_old_communicator_still_brings_is_written_nowhere(receiving: Receiving) -> None:
    old = receiving.begin(1)
    receiving.receive(coming(0, [0]))
    assert receiving.receive(entry(2), coming(0, [0], session=2)) == [old]
    assert receiving.receives(old) is None
    assert receiving.receives(receiving.begun[-1]) == [20]
    assert over(receiving.target.take_messages()) == [(WRITER, 1)]


def test_older_sessions_and_strangers_are_not_heard(receiving: Receiving) -> None:
    receiving.begin(5)
    receiving.target.take_messages()
    assert receiving.receive(entry(4), coming(0, [0], session=4), SessionOver(session=4, reason="late")) == []
    assert receiving.receive(entry(6), peer=("p9", 1)) == []
    assert len(receiving.begun) == 1
    assert receiving.target.take_messages() == []


def test_a_worker_that_comes_under_a_new_name_has_no_session_under_the_old_one(receiving: Receiving) -> None:
    old, newer = receiving.begin(1), (WRITER[0], WRITER[1] + 1)
    receiving.target.address(newer)
    assert receiving.receive(entry(2), peer=newer) == [old]
    assert receiving.receive(entry(3)) == [], "an echo under the old name"
    assert len(receiving.begun) == 2


@pytest.mark.parametrize(
    "messages", [[coming(1, [0])], [coming(0, [0]), coming(0, [0])], [coming(0, [0]), coming(2, [1])]]
)
def test_announcements_out_of_order_end_the_session_once(
    receiving: Receiving, messages: list[Message]
) -> None:
    session = receiving.begin()
    assert receiving.receive(*messages) == [session]
    assert receiving.receive(coming(0, [0]), coming(1, [0])) == []
    assert over(receiving.target.take_messages()) == [(WRITER, 1)]
    assert not session.coming


@pytest.mark.parametrize(
    "announced",
    [coming(0, [0], layers=(4, 5)), coming(0, [0], layers=(0, 0)), coming(0, []), coming(0, [0, 1, 2])],
)
def test_a_parcel_that_cannot_be_ends_the_session(receiving: Receiving, announced: ParcelComing) -> None:
    session = receiving.begin()
    assert receiving.receive(announced) == [session]


def test_what_was_announced_may_come_again_when_a_session_has_ended(receiving: Receiving) -> None:
    session = receiving.begin(1)
    receiving.receive(coming(0, [0]), coming(1, [1]))
    assert receiving.target.over(session, "by a test")
    assert not receiving.target.over(session, "that is known")
    again = receiving.begin(2)
    receiving.receive(coming(0, [0, 1], session=2))
    assert receiving.receives(again) == [20, 21]


def test_a_writer_that_has_closed_its_end_or_is_shut_out_has_its_communicator_torn_down(
    receiving: Receiving,
) -> None:
    session = receiving.begin(1)
    assert receiving.receive(SessionOver(session=1, reason="closed")) == [session]
    assert receiving.target.take_messages() == [], "it knows"
    session = receiving.begin(2)
    receiving.target.shut_out(WRITER)
    assert receiving.receive(entry(3)) == [session]
