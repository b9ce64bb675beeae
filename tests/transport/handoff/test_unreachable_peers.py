"""Decode workers out of reach, restarted or renamed, as the sending end meets them."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
import zmq
from msgspec.structs import replace
from support.messages import SPEC
from support.ports import kept_port
from support.sending_end import PEER, Reached, SlowMover

from splitserve.transport.channels.channels import RouterChannel
from splitserve.transport.handoff.reachability import ReachTimes
from splitserve.transport.handoff.sending_end import RetiringEnd
from splitserve.transport.messages.fields import COUNT_BITS
from splitserve.transport.messages.messages import FROM_PREFILL, Message, Met, Peer, Retire, Retired


def test_a_prompt_for_an_earlier_incarnation_does_not_cut_off_the_one_that_is_there() -> None:
    """It had waited here since before the decode worker was fenced."""
    reached, newer = Reached(), (PEER[0], PEER[1] + 1)
    assert reached.connect(newer) == {newer}
    assert reached.connect(PEER) == {newer}
    reached.end.close()
    reached.router.close()


@pytest.mark.parametrize("number", [1, 7])
def test_of_two_processes_of_one_name_the_one_that_answers_is_there(number: int) -> None:
    """Numbers were the time of day, and the larger one was taken for the later: after a clock had been set
    back every handoff to the new process failed, "it has restarted", for as long as the step was."""
    reached, process = Reached(), (PEER[0], PEER[1] + (number << COUNT_BITS))
    for one, other in ((PEER, process), (process, PEER)):
        assert reached.connect(one) == {PEER, process} if one == process else {PEER}
        reached.sender.offer(
            Peer(worker_id=one[0], incarnation=one[1], address=reached.router.address), SPEC, 1, [], 0.0
        )
        reached.act()
        reached.end._receive(one, Met(worker_id=one[0], incarnation=one[1], mover="shm", num_blocks=8), 0.0)
        reached.act()
        assert one in reached.end._channels
        assert other not in reached.end._channels
    reached.sender.retire()
    assert [peer.incarnation for peer in reached.sender.meetings.retirement.pending()] == [process[1]]
    reached.end.close()
    reached.router.close()


def test_an_address_that_is_none_fails_the_prompts_for_it_and_nothing_else() -> None:
    """One decode worker with a mistaken --advertise-host ended every prefill worker."""
    reached = Reached()
    mistaken = Peer(worker_id="d1", incarnation=1, address="tcp://[tcp://192.0.2.7]:7740")
    reached.sender.offer(mistaken, replace(SPEC, dispatch=SPEC.dispatch + 1), 1, [], time.monotonic())
    reached.act()
    ((key, kind, message),) = reached.act()
    assert (key[1], kind) == (SPEC.dispatch + 1, "peer_lost")
    assert "cannot connect to tcp://[tcp://192.0.2.7]:7740" in message
    reached.end.receive(set(), time.monotonic())
    assert set(reached.end._channels) == {PEER}
    reached.end.close()
    reached.router.close()


def test_where_another_process_answers_nothing_more_is_said_to_the_one_before() -> None:
    reached, process = Reached(), (PEER[0], PEER[1] + (1 << COUNT_BITS))
    reached.end._receive(PEER, Met(worker_id=PEER[0], incarnation=process[1]), 0.0)
    ((_, kind, _),) = reached.act()
    assert kind == "peer_lost"
    assert reached.end._channels == {}
    reached.end.close()
    reached.router.close()


def test_a_role_that_is_over_waits_for_no_process_that_has_ended() -> None:
    """A decode worker's process was killed, another one answered at its address, and the retiring end asked
    the first one for ever: its channel was closed."""
    reached, process = Reached(), (PEER[0], PEER[1] + (1 << COUNT_BITS))
    reached.sender.receive(PEER, Met(worker_id="d0", incarnation=1, mover="shm", num_blocks=8), 0.0)
    reached.sender.retire()
    assert not reached.sender.meetings.retirement.is_complete
    reached.end._receive(PEER, Met(worker_id=PEER[0], incarnation=process[1]), 0.0)
    assert reached.sender.meetings.retirement.is_complete
    reached.end.close()
    reached.router.close()


def test_handoffs_to_who_has_gone_beyond_reach_are_given_back(caplog: pytest.LogCaptureFixture) -> None:
    reached = Reached()
    reached.end.receive(set(), time.monotonic() + 60)
    assert reached.act() == []  # it is there, and may take its time
    reached.router.close()
    reached.until_gone()
    reached.end.receive(set(), time.monotonic() + ReachTimes().beyond_reach + 61)
    ((key, kind, message),) = reached.act()
    assert (key, kind) == ((SPEC.coordinator, SPEC.dispatch), "peer_lost")
    assert message == "worker d0 cannot be reached from here"
    reached.end.receive(set(), time.monotonic() + ReachTimes().beyond_reach + 62)
    assert caplog.text.count("d0 cannot be reached from here: check the network") == 1
    reached.end.close()


def test_a_role_that_is_over_says_so_until_it_is_answered() -> None:
    reached = Reached()
    reached.sender.receive(PEER, Met(worker_id="d0", incarnation=1, mover="shm", num_blocks=8), 0.0)
    mover = reached.end._movers[PEER] = SlowMover()
    mover.put(1, b"s" * 16, [(0, 1, 1)])
    retiring = RetiringEnd(reached.end)
    assert not mover.under_way, "nothing is written any more by the time that it says so"
    sent: list[tuple[bytes, Message]] = []
    for second in (100, 200):
        retiring.turn(time.monotonic() + second)
        while not (sent and sent[-1][1] == Retire(incarnation=1)):
            assert reached.router.socket.poll(60_000), "it says Retire"
            sent += reached.router.receive(1)
        identity, _ = sent.pop()
    assert not retiring.is_over
    assert reached.router.send(identity, Retired(incarnation=1))
    socket = reached.end._channels[PEER].socket
    assert isinstance(socket, zmq.Socket)
    assert socket.poll(60_000)
    retiring.turn(time.monotonic())
    assert retiring.is_over
    retiring.close()
    reached.router.close()


def test_who_stays_away_is_forgotten_and_connected_to_anew_when_a_prompt_is_for_it(stack: ExitStack) -> None:
    address = stack.enter_context(kept_port())
    reached = Reached(address)
    reached.router.close()
    gone_since = reached.until_gone()
    reached.end.receive(set(), gone_since + ReachTimes().forgotten - 1)
    reached.act()
    assert PEER in reached.end._channels
    reached.end.receive(set(), gone_since + ReachTimes().forgotten + 1)
    assert reached.end._channels == {}
    with RouterChannel.bind(address, None, FROM_PREFILL) as again:
        reached.sender.offer(
            Peer(worker_id=PEER[0], incarnation=PEER[1], address=address), SPEC, 1, [], time.monotonic()
        )
        reached.act()
        assert again.socket.poll(60_000), "it says Meet"
        reached.end.close()
