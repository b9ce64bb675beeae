"""Movers that fail, and meetings that are repeated: which mover carries the handoff then."""

from __future__ import annotations

import pytest
from support.handoff_pair import DECODE, MODEL, PREFILL, Pair, spec, whole

from splitserve.transport.handoff import meetings
from splitserve.transport.handoff import protocol as act
from splitserve.transport.messages.fields import WIRE_VERSION
from splitserve.transport.messages.messages import Meet, Met, OtherVersion, Peer


def test_a_mover_that_fails_is_replaced_by_zmq() -> None:
    """What was under way ends and frees its blocks; the peer is met anew, and the next handoff is not by
    shared memory."""
    pair = Pair(movers=("shm", "tcp"))
    pair.offer(spec(1))
    pair.deliver()
    assert pair.sender.mover_failed(DECODE, "the memory is gone")
    assert pair.sender.num_fallbacks == 1
    pair.deliver()
    assert [type(end) for end in pair.ended] == [act.Undelivered]
    assert pair.pool.num_used == 0
    pair.sender.receive(
        DECODE, Met(worker_id="d", incarnation=2, mover="shm", num_blocks=16), pair.now
    )  # an echo of the first meeting
    whole(pair, spec(2, epoch=1))
    assert [join.handoff.spec.dispatch for join in pair.joined] == [2]
    assert not pair.sender.mover_failed(DECODE, "the network is gone"), (
        "there is nothing else to fall back to"
    )
    assert pair.sender.num_fallbacks == 1


def test_the_answer_to_an_echo_of_a_meeting_decides_nothing() -> None:
    """A Meet meant for the decode worker's earlier incarnation, with which shm had failed, came late; its
    answer named tcp, and was taken for the answer to the Meet that followed. The receiver went by shm: it
    took blocks in Placed for written, while parcels were still on their way into blocks that it had
    verified."""
    pair = Pair(movers=("shm", "tcp"))
    pair.offer(spec())
    echo = Meet(worker_id="p", incarnation=1, host="h", pid=5, model=MODEL, movers=("tcp",), addressee=1)
    pair.receiver.receive(PREFILL, echo, pair.now)
    pair.deliver()
    (lease,) = pair.receiver.leases.by_lease
    assert pair.opened == [pair.receiver.leases.by_lease[lease].mover] == ["shm"]


def test_a_meet_that_was_meant_for_an_earlier_incarnation_is_told_who_is_here() -> None:
    pair = Pair()
    pair.sender.offer(Peer(worker_id="d", incarnation=1, address="tcp://d"), spec(), 3, [], pair.now)
    pair.collect()
    (meet,) = pair.to_receiver
    pair.receiver.receive(PREFILL, meet, pair.now)
    pair.collect()
    (met,) = pair.to_sender
    pair.sender.receive(("d", 1), met, pair.now)
    pair.collect()
    (ended,) = pair.ended
    assert isinstance(ended, act.Undelivered)
    assert "has restarted" in ended.message


def test_a_forced_mover_that_fails_in_use_is_replaced_too_and_an_echo_does_not_bring_it_back() -> None:
    pair = Pair(movers=("shm",))
    pair.offer(spec(1))
    pair.collect()
    (first,) = [message for message in pair.to_receiver if isinstance(message, Meet)]
    pair.deliver()
    assert pair.sender.mover_failed(DECODE, "the memory is gone")
    whole(pair, spec(2, epoch=1))
    pair.to_receiver.append(first)
    whole(pair, spec(3, epoch=2))
    assert [join.handoff.spec.dispatch for join in pair.joined] == [2, 3]
    assert pair.sender.num_fallbacks == 1


def test_a_decode_worker_of_another_wire_version_ends_the_handoff_with_a_sentence() -> None:
    pair = Pair()
    pair.offer(spec(1))
    pair.collect()
    pair.to_receiver[:] = [OtherVersion(wire_version=WIRE_VERSION + 2)]  # as its channel decodes the Meet
    pair.deliver()
    (ended,) = pair.ended
    assert isinstance(ended, act.Undelivered)
    assert f"worker d: wire version {WIRE_VERSION} there" in ended.message
    pair.sender.receive(DECODE, OtherVersion(), pair.now)  # an echo
    assert not pair.sender.take()


def test_who_forces_a_mover_that_the_other_has_not_is_refused_while_none_has_failed() -> None:
    pair = Pair(movers=("nccl",))
    pair.offer(spec(1))
    pair.deliver()
    ((_, kind, reason),) = [(e.key, e.kind, e.message) for e in pair.ended if isinstance(e, act.Undelivered)]
    assert kind == "peer_lost"
    assert "no mover in common: prefill has nccl; decode has shm, nixl, tcp" in reason


def test_a_communicator_is_made_anew_once_before_another_mover_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        meetings, "MADE_ANEW", frozenset({"nixl"})
    )  # stands for nccl, which this receiver has not
    pair = Pair(movers=("nixl",))
    for number in (1, 2):
        whole(pair, spec(number))
        assert not pair.sender.mover_failed(DECODE, "broke after a handoff that it had carried"), number
    assert pair.sender.mover_failed(DECODE, "nobody is met") is False
    pair.offer(spec(3))
    pair.deliver()
    assert pair.sender.mover_failed(DECODE, "broke again")
    whole(pair, spec(4))
    assert [join.handoff.spec.dispatch for join in pair.joined] == [1, 2, 4]
    assert pair.sender.num_fallbacks == 1
