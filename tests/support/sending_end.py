"""A sending end between fakes of its peers and movers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq
from support.kv_pools import filled_pool
from support.messages import SPEC

from splitserve.transport.channels.channels import RouterChannel
from splitserve.transport.handoff.protocol import Connect, Undelivered
from splitserve.transport.handoff.sender import HandoffSender
from splitserve.transport.handoff.sending_end import SendingEnd
from splitserve.transport.live_environment import live_environment
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import FROM_PREFILL, Meet, Message, ModelIdentity, Peer, PeerId
from splitserve.transport.movers.interface import Arrival, Item

PEER = ("d0", 1)
MODEL = ModelIdentity(kv_name="f", dtype="float32", block_size=16, cache_map=states(1, 1), block_bytes=1)


def end_of(sender: HandoffSender) -> SendingEnd:
    return SendingEnd(sender, ("p", 1), live_environment(filled_pool(8), None, zmq.Poller(), True))


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


def sent(end: SendingEnd) -> list[type[Message]]:
    end.receive(set(), 0.0)
    return [type(message) for message in end._channels[PEER].sent]  # type: ignore[attr-defined]


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
