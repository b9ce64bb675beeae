"""What the two ends of the mover nccl decide, without communicators, threads or clocks."""

from __future__ import annotations

from collections.abc import Sequence

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
from splitserve.transport.movers.lease_book import LeaseBook
from splitserve.transport.movers.nccl_receiver import (
    BeginSession,
    EndSession,
    PassEntry,
    Receive,
    ReceivingSession,
    ReceivingSessions,
    SessionAction,
)
from splitserve.transport.movers.nccl_sender import LeavingParcel, SendingSession

WRITER, SECRET = ("p0", 7), b"0123456789abcdef"
NUM_LAYERS, LAYER_BYTES, WHOLE = 4, 10, slice(0, 4)
PATIENCE_S = 16.0


def sending(number: int = 1) -> SendingSession:
    return SendingSession(number, PATIENCE_S, now=100.0)


def items(*positions: int) -> list[tuple[int, int, int]]:
    return [(position, 10 + position, 20 + position) for position in positions]


class Receiving:
    """The receiving end, with a lease for three blocks."""

    def __init__(self) -> None:
        self.book = LeaseBook(NUM_LAYERS, LAYER_BYTES)
        self.book.open(9, SECRET, {0: 20, 1: 21, 2: 22})
        self.sessions = ReceivingSessions(self.book, NUM_LAYERS, LAYER_BYTES, parcel_bytes=80)
        self.sessions.meet(WRITER)

    def receive(self, *messages: Message, peer: PeerId = WRITER) -> list[SessionAction]:
        for message in messages:
            self.sessions.receive(peer, message)
        return self.sessions.take()

    def begin(self, number: int = 1, peer: PeerId = WRITER) -> ReceivingSession:
        begun = [a.session for a in self.receive(entry(number), peer=peer) if isinstance(a, BeginSession)]
        assert len(begun) == 1
        return begun[0]

    def receives(self, session: ReceivingSession) -> list[int] | None:
        """The blocks that the next parcel is written into."""
        assert self.sessions.next(session) is not None
        parcel = self.sessions.received(session)
        return None if parcel is None or parcel.claim is None else parcel.claim.blocks


@pytest.fixture
def receiving() -> Receiving:
    return Receiving()


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


# --- the sending end ---------------------------------------------------------------------------------


def test_parcels_are_announced_at_once_and_leave_one_by_one_once_both_ends_have_met() -> None:
    session = sending()
    session.put(9, SECRET, [items(0, 1), items(2)], WHOLE)
    assert [(m.number, m.session) for m in session.take_messages() if isinstance(m, ParcelComing)] == [
        (0, 1),
        (1, 1),
    ]
    assert (session.next(100.0), session.num_pending) == (None, 3)
    session.met()
    assert session.next(101.0) == LeavingParcel(0, 9, [0, 1], [10, 11], WHOLE)
    assert session.next(101.0) is None, "one at a time"
    session.left()
    assert session.poll(101.0) == [(9, 0), (9, 1)]
    assert session.next(101.0) == LeavingParcel(1, 9, [2], [12], WHOLE)


def test_what_is_cancelled_leaves_and_is_not_told_of() -> None:
    session = sending()
    session.met()
    session.put(8, SECRET, [items(0)], WHOLE)
    session.put(9, SECRET, [items(1)], WHOLE)
    for _ in range(2):
        assert session.next(100.0) is not None
        session.left()
    session.cancel(8)
    assert session.poll(100.0) == [(9, 1)]


def test_a_meeting_and_a_parcel_that_never_end_are_given_up() -> None:
    session = sending()
    assert session.poll(100.0 + PATIENCE_S) == []
    with pytest.raises(MoverError, match="hangs"):
        session.poll(100.1 + PATIENCE_S)
    session = sending()
    session.met()
    assert session.hangs_at is None, "it waits for nobody"
    assert session.poll(1000.0) == []
    session.put(9, SECRET, [items(0)], WHOLE)
    session.next(1000.0)
    assert session.hangs_at == 1000.0 + PATIENCE_S
    with pytest.raises(MoverError, match="hangs"):
        session.poll(1000.1 + PATIENCE_S)


def test_a_session_that_has_failed_sends_nothing_more_and_says_why() -> None:
    session = sending(5)
    session.met()
    session.put(9, SECRET, [items(0)], WHOLE)
    session.receive(SessionOver(session=4, reason="another's"))
    assert session.poll(100.0) == []
    session.receive(SessionOver(session=5, reason="announcements were lost"))
    session.fail("what followed from that")
    assert session.next(100.0) is None
    for use in (lambda: session.poll(100.0), lambda: session.put(9, SECRET, [items(1)], WHOLE)):
        with pytest.raises(MoverError, match="announcements were lost"):
            use()


def test_the_other_end_hears_that_a_session_is_closed() -> None:
    session = sending(5)
    session.put(9, SECRET, [items(0)], WHOLE)
    session.close()
    session.close()
    assert [(type(word), getattr(word, "session", 0)) for word in session.take_messages()] == [
        (SessionOver, 5)
    ]
    assert (session.num_pending, session.is_over, session.hangs_at) == (0, True, None)


def test_only_its_own_entries_are_for_the_communicator() -> None:
    session = sending(5)
    assert session.receive(entry(4)) is None
    assert session.receive(entry(5)) == entry(5)
    session.entry("0", b"here")
    assert session.take_messages() == [entry(5)]


# --- the receiving end -------------------------------------------------------------------------------


def test_the_first_word_begins_a_session_and_parcels_come_in_order(receiving: Receiving) -> None:
    actions = receiving.receive(entry(1), coming(0, [0]), coming(1, [2, 1]))
    assert [type(action) for action in actions] == [BeginSession, PassEntry, Receive, Receive]
    session, sessions = actions[0].session, receiving.sessions
    assert sessions.next(session) is not None
    assert sessions.next(session) is None, "one at a time"
    parcel = sessions.received(session)
    assert parcel is not None
    assert sessions.written(parcel) == [(9, 0)]
    assert receiving.receives(session) == [22, 21]


def test_a_parcel_whose_lease_has_ended_is_received_and_written_nowhere(receiving: Receiving) -> None:
    session = receiving.begin()
    receiving.receive(coming(0, [0]), coming(1, [1], lease=8), coming(2, [2]))
    assert receiving.sessions.next(session) is not None
    receiving.book.close(9)
    assert receiving.sessions.received(session) is None
    assert receiving.receives(session) is None
    assert receiving.receives(session) is None
    assert receiving.sessions.dropped == {"lease": 1}


def test_what_an_old_communicator_still_brings_is_written_nowhere(receiving: Receiving) -> None:
    """Its lease stands; the parcel comes again through the new one."""
    old = receiving.begin(1)
    receiving.receive(coming(0, [0]))
    assert receiving.sessions.next(old) is not None
    actions = receiving.receive(entry(2), coming(0, [0], session=2))
    assert actions[0] == EndSession(old)
    assert receiving.sessions.received(old) is None
    assert receiving.receives(actions[1].session) == [20]
    assert over(receiving.sessions.take_messages()) == [(WRITER, 1)]


def test_older_sessions_and_strangers_are_not_heard(receiving: Receiving) -> None:
    receiving.begin(5)
    receiving.sessions.take_messages()
    assert receiving.receive(entry(4), coming(0, [0], session=4), SessionOver(session=4, reason="late")) == []
    assert receiving.receive(entry(6), peer=("p9", 1)) == []
    assert receiving.sessions.take_messages() == []


def test_a_worker_that_comes_under_a_new_name_has_no_session_under_the_old_one(receiving: Receiving) -> None:
    old, newer = receiving.begin(1), (WRITER[0], WRITER[1] + 1)
    receiving.sessions.meet(newer)
    assert EndSession(old) in receiving.receive(entry(2), peer=newer)
    assert receiving.receive(entry(3)) == [], "an echo under the old name"


@pytest.mark.parametrize(
    "messages", [[coming(1, [0])], [coming(0, [0]), coming(0, [0])], [coming(0, [0]), coming(2, [1])]]
)
def test_announcements_out_of_order_end_the_session_once(
    receiving: Receiving, messages: list[Message]
) -> None:
    session = receiving.begin()
    assert EndSession(session) in receiving.receive(*messages)
    assert receiving.receive(coming(0, [0]), coming(1, [0])) == []
    assert over(receiving.sessions.take_messages()) == [(WRITER, 1)]
    assert receiving.sessions.next(session) is None


@pytest.mark.parametrize(
    "announced",
    [coming(0, [0], layers=(4, 5)), coming(0, [0], layers=(0, 0)), coming(0, []), coming(0, [0, 1, 2])],
)
def test_a_parcel_that_cannot_be_ends_the_session(receiving: Receiving, announced: ParcelComing) -> None:
    session = receiving.begin()
    assert receiving.receive(announced) == [EndSession(session)]


def test_what_was_announced_may_come_again_when_a_session_has_ended(receiving: Receiving) -> None:
    session = receiving.begin(1)
    receiving.receive(coming(0, [0]), coming(1, [1]))
    assert receiving.sessions.next(session) is not None
    assert receiving.sessions.broke(session, "by a test")
    assert not receiving.sessions.broke(session, "that is known")
    again = receiving.begin(2)
    receiving.receive(coming(0, [0, 1], session=2))
    assert receiving.receives(again) == [20, 21]


def test_a_writer_that_has_closed_its_end_or_is_shut_out_has_its_communicator_torn_down(
    receiving: Receiving,
) -> None:
    session = receiving.begin(1)
    assert receiving.receive(SessionOver(session=1, reason="closed")) == [EndSession(session)]
    assert receiving.sessions.take_messages() == [], "it knows"
    session = receiving.begin(2)
    receiving.sessions.shut_out(WRITER)
    assert receiving.receive(entry(3)) == [EndSession(session)]
