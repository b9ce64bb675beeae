"""The mover nccl, played by Gloo: communicators are made through the control channel, broken ones end with an
error, and a late piece never reaches a block whose lease has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.kv_pools import DEADLINE_S, NUM_BLOCKS, NUM_LAYERS, SECRET, empty_pool, filled_pool, until
from support.messages import MODEL

from splitserve.transport.errors import MoverError
from splitserve.transport.handoff.leases import Writers
from splitserve.transport.messages.messages import (
    Meet,
    Message,
    Met,
    ParcelComing,
    RendezvousEntry,
    SessionOver,
    u32,
)
from splitserve.transport.movers import communicator, lease_book
from splitserve.transport.movers.block_memory import BlockMemory, HostMemory
from splitserve.transport.movers.communicator import Communicator
from splitserve.transport.movers.interface import Arrival, MoverEndpoints, Pool
from splitserve.transport.movers.nccl import NcclSource
from splitserve.transport.movers.opening import nccl_source, nccl_target

WRITER = ("p0", 1)


class Pair:
    """Both ends, and the control channel between them."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack, self.source_pool, self.pool = stack, filled_pool(), empty_pool()
        self.target = nccl_target(HostMemory(self.pool), self.pool.shape)
        stack.callback(self.target.close_all)
        self.source = self.meet()
        self.arrived: list[Arrival] = []
        self.left: list[Arrival] = []
        self.lost: Callable[[Message], bool] = lambda message: False

    def meet(self) -> NcclSource:
        source = nccl_source(
            self.target.address(WRITER), HostMemory(self.source_pool), self.source_pool.shape
        )
        self.stack.callback(source.close)
        return source

    def turn(self) -> None:
        """What both workers' loops do once. Raises MoverError as the source does."""
        for message in self.source.take_messages():
            if not self.lost(message):
                self.target.receive(WRITER, message)
        self.arrived += self.target.poll(100)
        for peer, message in self.target.take_messages():
            assert peer == WRITER
            self.source.receive(message)
        self.left += self.source.poll()

    def until(self, condition: Callable[[], object]) -> None:
        def met() -> object:
            self.turn()
            return condition()

        until(met)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def expected(pair: Pair, own: list[int], peers: list[int]) -> Pool:
    pool = empty_pool()
    pool[peers] = pair.source_pool[own]
    return pool


def test_blocks_and_layers_reach_their_places_and_no_other(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_book, "PARCEL_BYTES", 3 * pair.pool[0].nbytes)  # several pieces
    rng = np.random.default_rng(1)
    own, peers = rng.permutation(NUM_BLOCKS)[:20].tolist(), rng.permutation(NUM_BLOCKS)[:20].tolist()
    pair.target.open(9, SECRET, dict(enumerate(peers)))
    pair.source.put(9, SECRET, list(zip(range(10), own[:10], peers[:10], strict=True)))
    for first, count in ((0, 1), (1, 2), (3, None)):
        pair.source.put(9, SECRET, list(zip(range(10, 20), own[10:], peers[10:], strict=True)), first, count)
    pair.until(lambda: len(pair.arrived) == 20 and not pair.source.pending())
    assert sorted(pair.arrived) == [(9, position) for position in range(20)]
    assert sorted(set(pair.left)) == sorted(pair.arrived)
    assert np.array_equal(pair.pool, expected(pair, own, peers))
    assert not pair.target.dropped


@pytest.mark.parametrize(
    ("what", "lease", "secret", "position"),
    [("lease", 8, SECRET, 0), ("secret", 9, b"x" * 16, 0), ("position", 9, SECRET, 5)],
)
def test_what_is_not_granted_is_received_and_thrown_away(
    pair: Pair, what: str, lease: int, secret: bytes, position: int
) -> None:
    pair.target.open(9, SECRET, {0: 7})
    pair.source.put(lease, secret, [(position, 1, 7)])
    pair.source.put(9, SECRET, [(0, 2, 7)])
    pair.until(lambda: pair.arrived)
    assert pair.target.dropped == {what: 1}
    assert np.array_equal(pair.pool, expected(pair, [2], [7]))


def test_a_piece_that_comes_after_its_lease_has_ended_reaches_no_block(pair: Pair) -> None:
    pair.target.open(9, SECRET, {0: 7, 1: 8})
    pair.source.put(9, SECRET, [(0, 1, 7)])
    pair.until(lambda: pair.arrived)
    announced = ParcelComing(
        session=pair.source.number,
        number=1,
        lease=9,
        secret=SECRET,
        first_layer=0,
        num_layers=NUM_LAYERS,
        positions=u32([1]),
    )
    pair.target.receive(WRITER, announced)
    pair.target.close(9)
    pair.target.open(10, SECRET, {0: 9})
    pair.lost = lambda message: (
        isinstance(message, ParcelComing) and message.number == 1
    )  # it has come already
    pair.source.put(9, SECRET, [(1, 2, 8)])
    pair.source.put(10, SECRET, [(0, 3, 9)])
    pair.until(lambda: (10, 0) in pair.arrived)
    assert (9, 1) not in pair.arrived
    assert np.array_equal(pair.pool, expected(pair, [1, 3], [7, 9]))


def test_a_lost_announcement_breaks_the_session_and_the_next_one_works(pair: Pair) -> None:
    pair.target.open(9, SECRET, {0: 7, 1: 8, 2: 9})
    pair.source.put(9, SECRET, [(0, 1, 7)])
    pair.until(lambda: pair.arrived)
    pair.lost = lambda message: isinstance(message, ParcelComing) and message.number == 1
    pair.source.put(9, SECRET, [(1, 2, 8)])
    pair.source.put(9, SECRET, [(2, 3, 9)])
    with pytest.raises(MoverError, match="communicator"):
        pair.until(lambda: False)
    pair.source.close()
    pair.lost = lambda message: False
    pair.source = pair.meet()
    pair.source.put(9, SECRET, [(1, 2, 8), (2, 3, 9)])
    pair.until(lambda: len(pair.arrived) == 3)
    assert np.array_equal(pair.pool, expected(pair, [1, 2, 3], [7, 8, 9]))


def test_a_peer_that_never_answers_is_an_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "LIMIT_S", 0.2)
    pair.source = pair.meet()
    with pytest.raises(MoverError, match="broke"):
        until(lambda: pair.source.poll() and False)


def test_a_source_that_stops_sending_breaks_its_session_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.target.open(9, SECRET, {0: 7, 1: 8})
    pair.source.put(9, SECRET, [(0, 1, 7)])
    pair.until(lambda: pair.arrived)
    session = pair.source.number
    announced = ParcelComing(
        session=session, number=1, lease=9, secret=SECRET, first_layer=0, num_layers=1, positions=u32([1])
    )
    with monkeypatch.context() as impatient:
        impatient.setattr(communicator, "LIMIT_S", 0.2)
        pair.target.receive(WRITER, announced)  # and then nothing
        with pytest.raises(MoverError, match=r"decode worker has ended|broke"):
            pair.until(lambda: False)
    pair.source.close()
    pair.source = pair.meet()
    pair.source.put(9, SECRET, [(1, 2, 8)])
    pair.until(lambda: len(pair.arrived) == 2)
    assert np.array_equal(pair.pool, expected(pair, [1, 2], [7, 8]))


@pytest.mark.parametrize(
    ("first_layer", "num_layers", "positions"),
    [(0, 0, [0]), (NUM_LAYERS, 1, [0]), (0, 1 << 40, [0]), (0, 1, [])],
)
def test_announcements_that_cannot_be_end_the_session(
    pair: Pair, first_layer: int, num_layers: int, positions: list[int]
) -> None:
    pair.until(lambda: pair.source.end._deadline is None)
    session = pair.source.number
    pair.target.receive(
        WRITER,
        ParcelComing(
            session=session,
            number=0,
            lease=9,
            secret=SECRET,
            first_layer=first_layer,
            num_layers=num_layers,
            positions=u32(positions),
        ),
    )
    with pytest.raises(MoverError, match="cannot be"):
        pair.until(lambda: False)


def test_a_source_that_is_closed_has_the_other_ends_communicator_torn_down(pair: Pair) -> None:
    """Else it stays, with its thread, where tcp takes its place."""
    pair.target.open(9, SECRET, {0: 7})
    pair.source.put(9, SECRET, [(0, 1, 7)])
    pair.until(lambda: pair.arrived)
    (session,) = pair.target.sessions.values()
    assert session is not None
    pair.source.close()
    pair.turn()
    assert session.is_over
    session.end.join(DEADLINE_S)
    assert not session.end.is_alive()


def test_strangers_words_make_nothing(pair: Pair) -> None:
    for message in (RendezvousEntry(session=5, key="0/0", value=b"x"), SessionOver(session=5, reason="no")):
        pair.target.receive(("p9", 1), message)
    assert set(pair.target.sessions) == {WRITER}
    assert pair.target.take_messages() == []


def test_pools_on_different_devices_are_refused() -> None:
    with pytest.raises(MoverError, match=r"cpu.*cuda"):
        nccl_source(b"cuda", HostMemory(filled_pool(2)), (2, NUM_LAYERS, 16))


def test_two_ends_on_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_gpu(uuid: str) -> BlockMemory:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
        memory: BlockMemory = SimpleNamespace(device=torch.device("cuda", 0))  # type: ignore[assignment]
        return memory

    target = nccl_target(on_gpu("a"), (2, NUM_LAYERS, 16))
    address = target.address(WRITER)
    target.close_all()
    with pytest.raises(MoverError, match="no two processes on one GPU"):
        nccl_source(address, on_gpu("a"), (2, NUM_LAYERS, 16))
    with pytest.raises(MoverError, match=r"cuda b.*cpu"):
        nccl_source(b"cpu", on_gpu("b"), (2, NUM_LAYERS, 16))
    monkeypatch.setattr(Communicator, "start", lambda thread: None)
    assert not nccl_source(address, on_gpu("b"), (2, NUM_LAYERS, 16)).is_over


def test_two_workers_on_one_gpu_are_not_offered_it() -> None:
    meet = Meet(worker_id="p", incarnation=1, host="h", pid=5, model=MODEL, movers=("nccl", "tcp"), gpu="a")

    def met(meet: Meet, gpu: str) -> Met:
        writers = Writers(MODEL, MoverEndpoints(("nccl", "tcp"), "h", gpu=gpu), 4)
        return writers.meet(WRITER, meet, ("d", 1))

    assert met(meet, "a").mover == "tcp"
    assert met(meet, "b").mover == "nccl"
    assert met(replace(meet, gpu=""), "").mover == "nccl", "host memory, by Gloo"
    assert "between two GPUs only; these share one" in met(replace(meet, movers=("nccl",)), "a").refused


def test_closing_does_not_wait_for_a_peer_that_is_silent(pair: Pair) -> None:
    start = time.monotonic()
    pair.source.close()
    assert time.monotonic() - start < communicator.LIMIT_S / 2
