"""One worker, several coordinators: each receives its own messages, and none loses work by another's
fault."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import zmq

from splitserve.transport.channels.channels import RouterChannel
from splitserve.transport.channels.coordinator_links import CoordinatorLinks
from splitserve.transport.live_environment import LiveNetwork
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import (
    FROM_WORKER,
    Alive,
    BlockEvents,
    Cancel,
    Fenced,
    Goodbye,
    Hello,
    Joined,
    Load,
    Message,
    ModelIdentity,
    Welcome,
    u32,
)

MODEL = ModelIdentity(kv_name="f", dtype="float32", block_size=16, cache_map=states(1, 64), block_bytes=64)
NUMBERS = (
    "blocks_free",
    "blocks_cached",
    "blocks_used",
    "blocks_leased",
    "num_running",
    "num_waiting",
    "num_waiting_tokens",
    "steps",
)


class Cluster:
    """A worker's links, and the sockets of as many coordinators as a test wants."""

    def __init__(
        self, num_known: int, found: Callable[[Cluster], Sequence[str]] = lambda cluster: ()
    ) -> None:
        """``found``: returns the addresses that are found by name."""
        self.routers = [RouterChannel.bind("tcp://127.0.0.1:*", None, FROM_WORKER) for _ in range(2)]
        self.noted: list[object] = []
        self.poller, counter = zmq.Poller(), itertools.count(5)
        known = [router.address for router in self.routers[:num_known]]
        network = LiveNetwork(None, self.poller)
        self.links = CoordinatorLinks(
            known,
            network,
            "w",
            self,
            lambda: next(counter),
            orphaned_after_s=10.0,
            discover=lambda: found(self),
        )
        self.identity = b""

    def hello(self, incarnation: int) -> Hello:
        numbers = {
            "max_model_len": 9,
            "vocab_size": 9,
            "num_blocks": 9,
            "max_num_seqs": 9,
            "max_batch_tokens": 9,
        }
        return Hello(
            worker_id="w", incarnation=incarnation, role="decode", host="h", pid=1, model=MODEL, **numbers
        )

    def welcomed(self, coordinator: int) -> None:
        self.noted.append(("welcomed", coordinator))

    def fenced(self, incarnation: int) -> None:
        self.noted.append(("fenced", incarnation))

    def orphaned(self) -> None:
        self.noted.append(("orphaned", self.links.coordinators))

    def receive(self, number: int) -> list[Message]:
        """What has come to this coordinator; waits for something."""
        router = self.routers[number]
        assert router.socket.poll(60_000), f"coordinator {number} received nothing"
        received = router.receive(100)
        self.identity = received[0][0]
        return [message for _, message in received]

    def send(self, number: int, message: Message) -> list[Message]:
        """What the worker is to do about it."""
        self.routers[number].send(self.identity, message)
        ready = {socket for socket, _ in self.poller.poll(60_000)}
        assert ready
        return self.links.receive(ready, 0.0)

    def welcome(self, number: int, others: Sequence[str] = ()) -> None:
        assert [type(message) for message in self.receive(number)] == [Hello]
        self.send(number, Welcome(coordinator=100 + number, heartbeat_s=0.25 + number, others=tuple(others)))


@pytest.fixture
def two() -> Iterator[Cluster]:
    """Both have welcomed the worker."""
    cluster = Cluster(num_known=2)
    cluster.links.tick(0.0)
    cluster.welcome(0)
    cluster.welcome(1)
    yield cluster
    close(cluster)


def close(cluster: Cluster) -> None:
    cluster.links.close()
    for router in cluster.routers:
        router.close()


def joined(coordinator: int) -> Joined:
    return Joined(coordinator=coordinator, dispatch=1, index=0, token=5)


def load(coordinator: int) -> Load:
    return Load(
        worker_id="w",
        incarnation=5,
        busy=False,
        accepting=True,
        dispatches=u32([coordinator]),
        **dict.fromkeys(NUMBERS, 0),
    )


def test_a_request_is_its_coordinators_and_reports_are_for_all(two: Cluster) -> None:
    events = BlockEvents(worker_id="w", incarnation=5, number=1, stored=b"h" * 16)
    two.links.send(joined(101), joined(100), events, joined(7))
    assert two.receive(0) == [joined(100), events]
    assert two.receive(1) == [joined(101), events]
    two.links.report(load)
    assert two.receive(0) == [load(100)]
    assert two.receive(1) == [load(101)]
    assert two.links.heartbeat_s == 0.25
    cancel = Cancel(coordinator=101, dispatches=u32([3]))
    assert two.send(1, cancel) == [cancel]


def test_whoever_has_not_welcomed_the_worker_hears_its_hello_alone() -> None:
    cluster = Cluster(num_known=2)
    cluster.links.tick(0.0)
    cluster.welcome(0)
    cluster.links.report(load)
    assert cluster.receive(0) == [load(100)]
    assert [type(message) for message in cluster.receive(1)] == [Hello]
    close(cluster)


def test_one_coordinator_names_the_others_of_its_host() -> None:
    cluster = Cluster(num_known=1)
    port = cluster.routers[1].address.rpartition(":")[2]
    cluster.links.tick(0.0)
    cluster.welcome(0, [f"tcp://0.0.0.0:{port}", cluster.routers[1].address])
    cluster.links.tick(0.1)
    cluster.welcome(1, [cluster.routers[0].address])
    assert cluster.links.coordinators == [100, 101]
    close(cluster)


def test_fenced_by_one_of_several_the_others_work_goes_on(two: Cluster) -> None:
    two.links.tick(0.1)
    two.links.report(load)
    two.receive(0)
    two.receive(1)
    two.send(1, Fenced(coordinator=101, reason="late"))
    assert two.noted[-1] == ("orphaned", [100])
    two.links.tick(0.2)
    (hello,) = two.receive(1)
    assert isinstance(hello, Hello)
    assert hello.incarnation == 5  # the same: to the other one nothing has happened
    two.send(1, Welcome(coordinator=111, heartbeat_s=1.0))
    assert two.links.coordinators == [100, 111]


def test_fenced_by_its_only_coordinator_it_is_another_incarnation() -> None:
    cluster = Cluster(num_known=1)
    cluster.links.tick(0.0)
    cluster.welcome(0)
    cluster.send(0, Fenced(coordinator=100, reason="late"))
    assert cluster.noted[-1] == ("fenced", 6)
    assert cluster.links.incarnation == 6
    close(cluster)


def test_coordinators_that_come_and_go_by_name() -> None:
    present = [0]
    cluster = Cluster(0, lambda cluster: [cluster.routers[number].address for number in present])
    cluster.links.tick(0.0)
    cluster.welcome(0)
    present.append(1)
    cluster.links.tick(1.0)
    cluster.welcome(1)
    assert cluster.links.coordinators == [100, 101]
    present.remove(0)
    cluster.links.tick(2.0)
    assert cluster.links.coordinators == [100, 101], "it may still end what it has asked for"
    cluster.links.tick(10.0)
    assert cluster.links.coordinators == [], "both are silent"
    cluster.links.tick(11.0)
    assert cluster.links.alone, "one is left for good"
    assert {type(message) for message in cluster.receive(1)} == {Hello}
    close(cluster)


def test_a_coordinator_that_takes_no_worker_in_says_why(two: Cluster) -> None:
    assert two.links.refusal == ""
    two.send(1, Fenced(coordinator=101, reason="it was restarted"))
    assert two.links.refusal == ""
    two.send(1, Alive(coordinator=101, misfit="another vocabulary"))
    assert (two.links.refusal, two.links.coordinators) == ("another vocabulary", [100])


def test_a_worker_has_left_when_every_coordinator_knows_it(two: Cluster) -> None:
    two.links.leave(0.0)
    two.links.send(joined(100))
    left = []
    for number in range(2):
        assert [type(message) for message in two.receive(number)] == [Goodbye]
        assert two.send(number, Cancel(coordinator=100 + number, dispatches=u32([3]))) == []
        two.send(number, Fenced(coordinator=100 + number, reason="it has left"))
        left.append(two.links.have_left)
    assert left == [False, True]
