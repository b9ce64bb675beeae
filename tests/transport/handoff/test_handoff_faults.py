"""Lost messages, silent writers and failing movers: every handoff ends, and no block stays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.handoff_pair import BLOCK, DECODE, MODEL, PREFILL, TIMES, Pair, spec, whole

from splitserve.transport.handoff import protocol as act
from splitserve.transport.messages.fields import COUNT_BITS
from splitserve.transport.messages.messages import (
    Ack,
    Grant,
    Handoff,
    Meet,
    Message,
    Met,
    Nack,
    Offer,
    Peer,
    Refuse,
    Release,
    Retire,
    Retired,
    Revoke,
    from_u32,
)


def test_what_was_not_put_yet_is_not_put_of_a_dropped_prompt() -> None:
    """A step had ended, and a Cancel came before its blocks left: when they were put they were free, and a
    new step perhaps wrote them; their checksums were those of the new content, and with the Handoff the
    decode worker joined them."""
    pair = Pair()
    pair.offer(spec())
    pair.deliver()
    pair.compute(spec())
    pair.sender.abandon((7, 1))
    actions = pair.sender.take()
    assert [type(action) for action in actions] == [act.CancelPuts, act.ToPeer]


def test_a_lease_revoked_under_a_new_incarnation_is_not_written_any_more() -> None:
    pair = Pair(movers=("shm",))
    pair.offer(spec())
    pair.deliver()
    (lease,) = pair.receiver.leases.by_lease
    revoke = Revoke(coordinator=7, dispatch=1, lease=lease, reason="fenced")
    pair.sender.receive(("d", 3), revoke, pair.now)
    pair.compute(spec())
    pair.deliver()
    assert pair.puts == []
    assert isinstance(pair.ended[0], act.Undelivered)


@pytest.mark.parametrize(("mover", "held"), [("shm", 3), ("tcp", 0)])
def test_a_silent_writers_blocks_are_quarantined_if_it_writes_by_itself(mover: str, held: int) -> None:
    pair = Pair(movers=(mover,))
    pair.offer(spec())
    pair.deliver()
    pair.receiver.tick(10.0)  # the sender is frozen: no renewal, no answer
    assert pair.pool.num_used == 3, "a parcel may be written into them until CloseLease is carried out"
    pair.collect()
    assert pair.pool.num_used == held
    pair.receiver.writer_gone(PREFILL)
    pair.collect()
    assert not pair.pool.num_used


def test_a_writer_of_another_host_that_stays_silent_is_shut_out_and_its_blocks_are_free() -> None:
    pair = Pair(movers=("nixl", "tcp"))
    for i in (1, 2):
        pair.offer(spec(i))
    pair.deliver()
    held = pair.pool.num_used
    pair.now = TIMES.lease
    pair.receiver.tick(pair.now)  # it is frozen: its leases end, and it does not answer
    pair.collect()
    pair.to_sender.clear()
    assert pair.receiver.silent_writers(pair.now + TIMES.silence - 0.1) == set()
    pair.now += TIMES.silence
    assert pair.receiver.silent_writers(pair.now) == {PREFILL}
    assert pair.pool.num_used == held
    pair.receiver.writer_shut_out(PREFILL)
    pair.collect()
    assert pair.pool.num_used == 0
    assert pair.sender.mover_failed(DECODE, "shut out"), (
        "thawed, it finds out by its next put, and goes on by tcp"
    )
    whole(pair, spec(3))
    assert [join.handoff.spec.dispatch for join in pair.joined] == [3]


def test_shutting_a_writer_out_ends_its_running_leases_too() -> None:
    pair = Pair(movers=("nixl",))
    pair.offer(spec())
    pair.deliver()
    pair.receiver.writer_shut_out(PREFILL)
    pair.collect()
    assert pair.pool.num_used == 0
    pair.deliver()
    assert isinstance(pair.ended[0], act.Undelivered)


def test_a_thawed_writer_lets_go_when_asked() -> None:
    pair = Pair(movers=("shm",))
    pair.offer(spec())
    pair.deliver()
    pair.receiver.tick(10.0)
    pair.deliver()
    assert pair.pool.num_used == 0
    assert isinstance(pair.ended[0], act.Undelivered)


def test_meeting_a_newer_incarnation_of_the_same_process_ends_the_quarantine() -> None:
    pair = Pair(movers=("shm",))
    pair.offer(spec())
    pair.deliver()
    pair.receiver.tick(10.0)
    meet = Meet(worker_id="p", incarnation=9, host="h", pid=5, model=MODEL, movers=("shm",))
    other = 9 + (1 << COUNT_BITS)
    pair.receiver.receive(("p", other), replace(meet, incarnation=other), 10.0)
    assert pair.pool.num_used == 3, "another process proves nothing"
    pair.receiver.receive(("p", 10), replace(meet, incarnation=10), 10.0)
    pair.collect()
    assert pair.pool.num_used == 0


def _cut_off_and_retired() -> Pair:
    """A writer by shm whose grant was lost, and which has another name since; the decode worker asks in vain
    for three blocks."""
    pair = Pair(movers=("shm",))
    pair.offer(spec())
    pair.deliver(drop=lambda message: isinstance(message, Grant))
    pair.sender.retire()
    pair.collect()
    pair.to_receiver.clear()  # a Release without a lease, which could free nothing
    pair.now = TIMES.lease
    pair.receiver.tick(pair.now)
    pair.collect()
    pair.to_sender.clear()
    assert pair.pool.num_used == 3
    return pair


def test_a_name_that_has_ended_is_told_until_it_is_heard_and_leaves_nothing_in_quarantine() -> None:
    pair = _cut_off_and_retired()
    for kind in (Retire, Retired):
        assert not pair.sender.meetings.retirement.is_complete
        pair.tick(TIMES.resend)
        pair.deliver(drop=lambda message, kind=kind: isinstance(message, kind))  # type: ignore[misc]
    assert pair.pool.num_used == 0
    pair.tick(TIMES.resend)
    pair.deliver()
    assert pair.sender.meetings.retirement.is_complete


def test_an_echo_does_not_bring_back_who_has_retired() -> None:
    """Its Meet and Offer came late: it would have been granted blocks that nobody lets go of."""
    pair = _cut_off_and_retired()
    pair.tick(TIMES.resend)
    pair.deliver()
    meet = Meet(worker_id="p", incarnation=1, host="h", pid=5, model=MODEL, movers=("shm",), addressee=2)
    pair.receiver.receive(PREFILL, meet, pair.now)
    offer = Offer(request_id="q", epoch=0, coordinator=7, dispatch=9, num_tokens=4, block_hashes=b"h" * 16)
    pair.receiver.receive(PREFILL, offer, pair.now)
    pair.collect()
    assert pair.to_sender == []
    assert pair.pool.num_used == 0
    pair.receiver.receive(("p", 3), replace(meet, incarnation=3), pair.now)
    pair.collect()
    assert isinstance(pair.to_sender[0], Met), "the same process under a later name is somebody else"


def test_an_echo_does_not_bring_back_who_has_come_under_a_later_name() -> None:
    """Its Retire was lost, and the later name's Meet had ended it here; then an older channel still brought
    its own Meet and Offer."""
    pair = Pair(movers=("shm",))
    meet = Meet(worker_id="p", incarnation=1, host="h", pid=5, model=MODEL, movers=("shm",))
    pair.receiver.receive(("p", 2), replace(meet, incarnation=2), pair.now)
    pair.collect()
    pair.to_sender.clear()
    pair.receiver.receive(("p", 1), meet, pair.now)
    offer = Offer(request_id="q", epoch=0, coordinator=7, dispatch=9, num_tokens=4, block_hashes=b"h" * 16)
    pair.receiver.receive(("p", 1), offer, pair.now)
    pair.collect()
    assert pair.to_sender == []
    assert pair.pool.num_used == 0


def test_the_end_of_one_name_is_not_that_of_the_next_nor_of_another_process() -> None:
    pair = Pair(movers=("shm",))
    pair.offer(spec())
    pair.deliver()
    for ended in (PREFILL[1] - 1, PREFILL[1] + (1 << COUNT_BITS), PREFILL[1] + (7 << COUNT_BITS)):
        pair.receiver.receive(("p", ended), Retire(incarnation=ended), pair.now)
        assert pair.pool.num_used == 3


def test_a_new_incarnation_says_for_the_old_one_that_it_writes_no_more() -> None:
    pair = Pair(movers=("shm",))
    pair.offer(spec())
    pair.deliver()
    pair.sender.peer_lost(DECODE, "it cannot be reached")
    pair.collect()
    pair.to_receiver.clear()
    pair.sender.rename(Meet(worker_id="p", incarnation=4, host="h", pid=5, model=MODEL, movers=("shm",)))
    assert [type(action) for action in pair.sender.take()] == [act.Connect]
    pair.tick(TIMES.resend)
    pair.deliver()
    assert pair.pool.num_used == 0
    assert pair.sender.meetings.retirement.is_complete


def test_a_decode_worker_with_a_new_name_is_told_too_and_one_that_is_gone_is_not() -> None:
    pair = Pair(movers=("shm",))
    whole(pair, spec())
    renamed = ("d", 8)
    pair.sender.offer(Peer(worker_id="d", incarnation=8, address="tcp://d"), spec(2), 3, [], pair.now)
    pair.sender.retire()
    pair.sender.take()
    pair.tick(TIMES.resend)
    assert [action.peer for action in pair.sender.take() if isinstance(action, act.ToPeer)] == [
        DECODE,
        renamed,
    ]
    pair.sender.meetings.retirement.forget(renamed[0])
    assert pair.sender.meetings.retirement.is_complete


def test_who_wrote_by_zmq_only_owes_nobody_a_word() -> None:
    pair = Pair(movers=("tcp",))
    whole(pair, spec())
    pair.sender.retire()
    assert pair.sender.meetings.retirement.is_complete


def test_renewal_keeps_a_slow_prompts_lease() -> None:
    pair = Pair()
    pair.offer(spec())
    pair.deliver()
    for _ in range(40):
        pair.tick(0.5)
        pair.deliver()
    pair.compute(spec())
    pair.deliver()
    assert len(pair.joined) == 1


KINDS: list[type[Message]] = [Meet, Met, Offer, Grant, Handoff, Ack, Nack, Release, Revoke, Refuse]


@settings(max_examples=200, deadline=None)
@given(
    lost=st.dictionaries(st.sampled_from(KINDS), st.integers(1, 2), max_size=6),
    mover=st.sampled_from(["shm", "tcp"]),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    cancelled=st.sets(st.integers(0, 4)),
    corrupt=st.sets(st.integers(0, 7), max_size=2),
)
def test_whatever_is_lost_every_handoff_ends_and_no_block_stays(
    lost: dict[type[Message], int], mover: str, lengths: list[int], cancelled: set[int], corrupt: set[int]
) -> None:
    pair = Pair(movers=(mover,))
    left = dict(lost)

    def drop(message: Message) -> bool:
        if left.get(type(message), 0) > 0:
            left[type(message)] -= 1
            return True
        return False

    specs = [spec(i, length, f"r{i}") for i, length in enumerate(lengths)]
    for what in specs:
        pair.offer(what)
        pair.deliver(drop)
        pair.corrupt = [corrupt]
        pair.compute(what)
        pair.deliver(drop)
        if what.dispatch in cancelled:
            pair.sender.abandon((7, what.dispatch))
            pair.receiver.cancel((7, what.dispatch))
            pair.deliver(drop)
    released: set[tuple[int, int]] = set()
    for _ in range(200):
        pair.tick(0.25)
        pair.deliver(drop)
        for join in pair.joined:
            if join.key not in released:
                released.add(join.key)
                pair.pool.release(join.blocks)  # the sequence has ended
    assert not pair.sender.outgoing
    assert not pair.receiver.keys()
    assert pair.pool.num_used == 0
    ended = {e.key for e in pair.ended}
    assert ended | {(7, i) for i in cancelled} >= {(7, what.dispatch) for what in specs}
    for join in pair.joined:
        assert len(join.blocks) == -(-len(from_u32(join.handoff.spec.token_ids)) // BLOCK)
