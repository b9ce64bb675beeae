"""A word that lets the peer read or reuse blocks waits until no put of that lease is writing them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import pytest
import zmq
from support.kv_pools import filled_pool
from support.messages import SPEC
from support.ports import kept_port

from splitserve.transport.channels.channels import RouterChannel
from splitserve.transport.errors import MoverError, PeerEnded
from splitserve.transport.handoff.protocol import (
    CancelPuts,
    Connect,
    Put,
    SendHandoff,
    SendPlaced,
    ToPeer,
    Undelivered,
)
from splitserve.transport.handoff.reachability import ReachTimes
from splitserve.transport.handoff.retiring_end import RetiringEnd
from splitserve.transport.handoff.sender import HandoffSender
from splitserve.transport.handoff.sending_end import SendingEnd
from splitserve.transport.live_environment import live_environment
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.fields import COUNT_BITS
from splitserve.transport.messages.messages import (
    FROM_PREFILL,
    Handoff,
    Meet,
    Message,
    Met,
    ModelIdentity,
    Peer,
    PeerId,
    Placed,
    Release,
    Renew,
    Retire,
    Retired,
    SessionOver,
    u64,
)
from splitserve.transport.movers.interface import Arrival, Item

PEER = ("d0", 1)
MODEL = ModelIdentity(kv_name="f", dtype="float32", block_size=16, cache_map=states(1, 1), block_bytes=1)


def end_of(sender: HandoffSender) -> SendingEnd:
    return SendingEnd(sender, "p", 1, live_environment(filled_pool(8), None, zmq.Poller(), True))


class SlowMover:
    """Writes the peer's memory by itself, until the test ends that."""

    def __init__(self) -> None:
        self.under_way: list[Arrival] = []
        self.done: list[Arrival] = []

    def put(
        self,
        lease: int,
        secret: bytes,
        items: Sequence[Item],
        first_layer: int = 0,
        num_layers: int | None = None,
    ) -> None:
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

    def close(self) -> set[int]:
        leases = {lease for lease, _ in self.under_way}
        self.under_way.clear()
        return leases


class Channel:
    socket = object()
    ever_connected = True

    def gone_since(self, now: float) -> None:
        """It is there."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, *messages: Message) -> bool:
        self.sent += messages
        return True


@pytest.fixture
def end() -> SendingEnd:
    meet = Meet(worker_id="p", incarnation=1, host="h", pid=1, model=MODEL, movers=("nixl",))
    end = end_of(HandoffSender(meet))
    end._channels[PEER] = Channel()  # type: ignore[assignment]
    end._movers[PEER] = SlowMover()
    return end


def sent(end: SendingEnd) -> list[type[Message]]:
    end.receive(set(), 0.0)
    return [type(message) for message in end._channels[PEER].sent]  # type: ignore[attr-defined]


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


class Reached:
    """A decode worker's listening end, met once, and the sending end that offers it a prompt."""

    def __init__(self, address: str = "tcp://127.0.0.1:*") -> None:
        self.router = RouterChannel.bind(address, None, FROM_PREFILL)
        peer = Peer(worker_id=PEER[0], incarnation=PEER[1], address=self.router.address)
        self.sender = HandoffSender(
            Meet(worker_id="p", incarnation=1, host="h", pid=1, model=MODEL, movers=("tcp",))
        )
        self.end = end_of(self.sender)
        self.sender.offer(peer, SPEC, 1, [], time.monotonic())
        self.act()
        assert self.router.socket.poll(60_000), "it says Meet"

    def act(self) -> list[object]:
        """Does what the sender wants done; returns what it wants of others."""
        actions = self.sender.take()
        for action in actions:
            if not isinstance(action, Undelivered):
                self.end.carry_out(action)
        return [action for action in actions if isinstance(action, Undelivered)]

    def until_gone(self, peer: PeerId = PEER, gone: bool = True) -> float:
        """Returns since when, as the channel has it."""
        channel, deadline = self.end._channels[peer], time.monotonic() + 60
        while ((since := channel.gone_since(time.monotonic())) is not None) is not gone:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return since or 0.0

    def connect(self, peer: PeerId) -> set[PeerId]:
        """Return the peers that have a channel then."""
        self.end.carry_out(Connect(Peer(worker_id=peer[0], incarnation=peer[1], address=self.router.address)))
        return set(self.end._channels)


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
        reached.end._receive(one, Met(worker_id=one[0], incarnation=one[1], mover="tcp", num_blocks=8), 0.0)
        reached.act()
        assert one in reached.end._channels
        assert other not in reached.end._channels
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


def test_handoffs_to_who_has_gone_beyond_reach_are_given_back() -> None:
    reached = Reached()
    reached.end.receive(set(), time.monotonic() + 60)
    assert reached.act() == []  # it is there, and may take its time
    reached.router.close()
    reached.until_gone()
    reached.end.receive(set(), time.monotonic() + ReachTimes().beyond_reach + 61)
    ((key, kind, message),) = reached.act()
    assert (key, kind) == ((SPEC.coordinator, SPEC.dispatch), "peer_lost")
    assert message == "decode worker d0 cannot be reached from here"
    reached.end.close()


def test_a_role_that_is_over_says_so_until_it_is_answered() -> None:
    reached = Reached()
    reached.sender.receive(PEER, Met(worker_id="d0", incarnation=1, mover="shm", num_blocks=8), 0.0)
    mover = reached.end._movers[PEER] = SlowMover()
    mover.put(1, b"s" * 16, [(0, 1, 1)])
    retiring = RetiringEnd(reached.end, reached.sender)
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
    reached.end.close()
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
