"""The KV handoff, both ends joined by a test that carries messages as badly as hypothesis likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.block_manager import BlockManager
from splitserve.transport import actions as act
from splitserve.transport.block_hash import chain, root_hash
from splitserve.transport.handoff import HandoffTimes
from splitserve.transport.handoff_receiver import HandoffReceiver, MoverEndpoints
from splitserve.transport.handoff_sender import HandoffSender
from splitserve.transport.layer_slicing import WHOLE_BLOCKS, LayerSlicing
from splitserve.transport.messages import (
    Ack,
    Grant,
    Handoff,
    Meet,
    Message,
    Met,
    ModelIdentity,
    Nack,
    Offer,
    Peer,
    Placed,
    Refuse,
    Release,
    RequestSpec,
    Revoke,
    Sampling,
    from_u32,
    u32,
    u64,
)

BLOCK, NUM_LAYERS = 4, 6
MODEL = ModelIdentity(fingerprint="m", dtype="float32", block_size=BLOCK, layout="l", block_bytes=64)
PREFILL, DECODE = ("p", 1), ("d", 2)
TARGET = Peer(worker_id="d", incarnation=2, address="tcp://d")
TIMES = HandoffTimes(lease=3.0, grant=20.0, ack=5.0)


def spec(dispatch: int = 1, num_tokens: int = 10, request_id: str = "r", epoch: int = 0) -> RequestSpec:
    tokens = u32(list(range(num_tokens)))
    return RequestSpec(
        request_id=request_id,
        epoch=epoch,
        dispatch=dispatch,
        coordinator=7,
        token_ids=tokens,
        num_prompt_tokens=num_tokens,
        sampling=Sampling(max_tokens=9),
        deadline_s=60.0,
    )


class Pair:
    """A sender and a receiver, a clock, and the pipes between them. Own block ``i`` of the sender holds the prompt's block ``i``."""

    def __init__(
        self, movers: tuple[str, ...] = ("zmq",), num_blocks: int = 16, model: ModelIdentity = MODEL, slicing: LayerSlicing = WHOLE_BLOCKS
    ) -> None:
        self.now = 0.0
        self.pool = BlockManager(num_blocks)
        self.room = (8, 0)
        meet = Meet(worker_id="p", incarnation=1, host="h", pid=5, model=model, movers=movers)
        self.sender = HandoffSender(meet, TIMES, slicing)
        endpoints = MoverEndpoints(("shm", "nixl", "zmq"), "h")
        self.receiver = HandoffReceiver(DECODE, MODEL, self.pool, endpoints, lambda: self.room, lambda: b"s" * 16, TIMES)
        self.to_receiver: list[Message] = []
        self.to_sender: list[Message] = []
        self.corrupt: list[set[int]] = []  # positions that fail the next check, and the one after it
        self.joined: list[act.Join] = []
        self.puts: list[int] = []  # positions put whole, or to the last layer
        self.slices: list[tuple[int, int, tuple[int, int] | None]] = []  # (first position, number of blocks, layers)
        self.checked: list[int] = []  # positions, as they were verified
        self.ended: list[act.Delivered | act.Undelivered] = []

    def collect(self) -> None:
        """Turns both sides' actions into messages under way and into what the movers do."""
        for action in self.sender.take():
            if isinstance(action, act.ToPeer):
                self.to_receiver.append(action.message)
            elif isinstance(action, act.SendHandoff):
                sums = u64(action.source_blocks)
                self.to_receiver.append(Handoff(spec=action.spec, lease=action.lease, token=action.token, checksums=sums))
            elif isinstance(action, act.SendPlaced):
                self.to_receiver.append(Placed(lease=action.lease, first=action.first, checksums=u64(action.source_blocks)))
            elif isinstance(action, act.Put):
                self.slices.append((action.items[0][0], len(action.items), action.layers))
                if action.layers is not None and action.layers[1] < NUM_LAYERS:
                    continue  # arrives with its last layer
                for position, _, _ in action.items:
                    self.puts.append(position)
                    self.receiver.arrived(action.lease, position)
            elif isinstance(action, act.Delivered | act.Undelivered):
                self.ended.append(action)
        while taken := self.receiver.take():
            self._carry_out(taken)

    def _carry_out(self, taken: list[act.ReceiverAction]) -> None:
        for received in taken:
            if isinstance(received, act.ToPeer):
                self.to_sender.append(received.message)
            elif isinstance(received, act.Verify):
                found = self.corrupt.pop(0) if self.corrupt else set()
                self.checked += received.positions
                bad = [p for p in received.positions if p in found]
                self.receiver.verified(received.lease, received.positions, bad, self.now)
            elif isinstance(received, act.Join):
                self.joined.append(received)

    def deliver(self, drop: Callable[[Message], bool] = lambda message: False) -> None:
        """Carries messages to and fro until nothing is under way."""
        self.collect()
        while self.to_receiver or self.to_sender:
            there, self.to_receiver = self.to_receiver, []
            back, self.to_sender = self.to_sender, []
            for message in there:
                if not drop(message):
                    self.receiver.receive(PREFILL, message, self.now)
            for message in back:
                if not drop(message):
                    self.sender.receive(DECODE, message, self.now)
            self.collect()

    def offer(self, what: RequestSpec) -> None:
        hashes = chain(root_hash("m"), what.token_ids, BLOCK)
        self.sender.offer(TARGET, what, -(-what.num_tokens // BLOCK), hashes, self.now)

    def compute(self, what: RequestSpec) -> None:
        blocks = list(range(-(-what.num_tokens // BLOCK)))
        self.sender.blocks_ready((7, what.dispatch), blocks, len(blocks))
        self.sender.finish((7, what.dispatch), blocks, 42, None, self.now)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.sender.tick(self.now)
        self.receiver.tick(self.now)


def whole(pair: Pair, what: RequestSpec) -> None:
    pair.offer(what)
    pair.deliver()
    pair.compute(what)
    pair.deliver()


def test_a_handoff() -> None:
    pair = Pair()
    whole(pair, spec())
    (join,) = pair.joined
    assert (join.token, len(join.blocks), join.num_cached_blocks) == (42, 3, 0)
    assert pair.ended == [act.Delivered((7, 1))]
    assert pair.puts == [0, 1, 2]
    assert pair.receiver.num_leased_blocks == 0


def test_what_the_receiver_has_is_not_sent() -> None:
    pair = Pair()
    whole(pair, spec(1, 12))
    pair.pool.release(pair.joined[0].blocks)
    pair.puts.clear()
    whole(pair, spec(2, 14, "other"))
    assert pair.joined[1].num_cached_blocks == 3
    assert pair.puts == [3]


def test_blocks_leave_while_the_prompt_is_computed() -> None:
    pair = Pair()
    pair.offer(spec())
    pair.deliver()
    pair.sender.blocks_ready((7, 1), [0, 1, 2], 2)
    pair.deliver()
    assert pair.puts == [0, 1]
    assert not pair.joined


def test_layers_leave_while_later_ones_are_computed() -> None:
    pair = Pair(slicing=LayerSlicing(NUM_LAYERS, 64, "layers"))
    pair.offer(spec())
    pair.deliver()
    for layer in range(1, NUM_LAYERS + 1):
        pair.sender.layers_ready((7, 1), [0, 1, 2], 3, layer)
        pair.deliver()
    assert pair.slices == [(0, 3, (layer, layer + 1)) for layer in range(NUM_LAYERS)]
    pair.sender.finish((7, 1), [0, 1, 2], 42, None, pair.now)
    pair.deliver()
    assert len(pair.slices) == NUM_LAYERS
    assert len(pair.joined) == 1


def test_what_is_verified_early_is_not_verified_again() -> None:
    pair = Pair()
    pair.offer(spec())
    pair.deliver()
    pair.sender.blocks_ready((7, 1), [0, 1, 2], 2)
    pair.deliver()
    assert pair.checked == [0, 1]
    pair.sender.finish((7, 1), [0, 1, 2], 42, None, pair.now)
    pair.deliver()
    assert pair.checked == [0, 1, 2]
    assert len(pair.joined) == 1


def test_a_block_found_corrupt_early_is_asked_for_with_the_handoff() -> None:
    pair = Pair()
    pair.corrupt = [{1}]
    pair.offer(spec())
    pair.deliver()
    pair.sender.blocks_ready((7, 1), [0, 1, 2], 2)
    pair.deliver()
    pair.sender.finish((7, 1), [0, 1, 2], 42, None, pair.now)
    pair.deliver()
    assert pair.puts == [0, 1, 2, 1]
    assert len(pair.joined) == 1


@settings(max_examples=200, deadline=None)
@given(
    mode=st.sampled_from(["auto", "layers", "blocks"]),
    rate=st.sampled_from([1e5, 1e6, 1e9]),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    layers=st.lists(st.lists(st.integers(1, NUM_LAYERS), max_size=6), min_size=4, max_size=4),
    granted_after=st.integers(0, 20),
    num_cached=st.integers(0, 5),
)
def test_every_layer_of_every_block_leaves_once_in_order_when_it_is_final(
    mode: Any, rate: float, chunks: list[int], layers: list[list[int]], granted_after: int, num_cached: int
) -> None:
    num_tokens = sum(chunks)
    pair = Pair(slicing=LayerSlicing(NUM_LAYERS, 64, mode), num_blocks=32)
    if num_cached:
        whole(pair, spec(1, num_cached * BLOCK, "earlier"))
        pair.slices.clear()
    pair.room = (0, 0)
    what = spec(2, num_tokens)
    pair.offer(what)
    pair.sender.moved(DECODE, int(rate), 1.0)
    blocks = list(range(-(-num_tokens // BLOCK)))
    put = dict.fromkeys(blocks, 0)
    computed, moment = 0, 0

    def moved_on(final: int, filling: int, num_layers: int) -> None:
        nonlocal moment
        moment += 1
        if moment == granted_after:
            pair.room = (8, 0)
            pair.receiver.grant_waiting(pair.now)
        pair.deliver()
        for first, count, slice_ in pair.slices:
            start, end = slice_ or (0, NUM_LAYERS)
            for block in range(first, first + count):
                assert put[block] == start
                assert block < final or (block < filling and end <= num_layers)
                put[block] = end
        pair.slices.clear()

    for chunk, seen in zip(chunks, layers, strict=False):
        before, computed = computed // BLOCK, computed + chunk
        stop = len(blocks) if computed == num_tokens else computed // BLOCK
        assert 0 <= pair.sender.layer_stride((7, 2), stop) <= NUM_LAYERS
        for num_layers in sorted(seen):
            pair.sender.layers_ready((7, 2), blocks, stop, num_layers)
            moved_on(before, stop, num_layers)
        if computed < num_tokens:
            pair.sender.blocks_ready((7, 2), blocks, stop)
            moved_on(stop, stop, 0)
    pair.sender.finish((7, 2), blocks, 42, None, pair.now)
    granted_after = moment + 1
    moved_on(len(blocks), len(blocks), 0)
    assert len(pair.joined) == 1 + bool(num_cached)
    already = pair.joined[-1].num_cached_blocks
    assert already == min(num_cached, num_tokens // BLOCK)
    assert [put[block] for block in blocks] == [0] * already + [NUM_LAYERS] * (len(blocks) - already)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "x"),
        ("dtype", "bfloat16"),
        ("block_size", 8),
        ("layout", "other"),
        ("block_bytes", 9),
        ("numerics", "exact, C++ avx2"),
    ],
)
def test_a_different_model_is_refused_in_a_sentence_that_names_the_field(field: str, value: Any) -> None:
    pair = Pair(model=MODEL.model_copy(update={field: value}))
    whole(pair, spec())
    (ended,) = pair.ended
    assert isinstance(ended, act.Undelivered)
    assert f"{field.replace('_', ' ')} differs" in ended.message
    assert repr(value) in ended.message


def test_a_lease_revoked_under_a_new_incarnation_is_not_written_any_more() -> None:
    pair = Pair(movers=("shm",))
    pair.offer(spec())
    pair.deliver()
    (lease,) = pair.receiver.leases()
    revoke = Revoke(coordinator=7, dispatch=1, lease=lease, reason="fenced")
    pair.sender.receive(("d", 3), revoke, pair.now)
    pair.compute(spec())
    pair.deliver()
    assert pair.puts == []
    assert isinstance(pair.ended[0], act.Undelivered)


def test_no_mover_in_common() -> None:
    pair = Pair(movers=("pigeon",))
    whole(pair, spec())
    assert isinstance(pair.ended[0], act.Undelivered)
    assert "no mover in common" in pair.ended[0].message


def test_without_room_the_grant_comes_later() -> None:
    pair = Pair()
    pair.room = (0, 0)
    whole(pair, spec())
    assert not pair.joined
    pair.room = (1, 0)
    pair.tick(0.1)
    pair.deliver()
    assert len(pair.joined) == 1


def test_what_can_never_fit_is_refused_for_good() -> None:
    pair = Pair(num_blocks=2)
    whole(pair, spec(num_tokens=40))
    assert isinstance(pair.ended[0], act.Undelivered)
    assert pair.ended[0].kind == "refused"
    assert "10 KV blocks" in pair.ended[0].message


def test_a_corrupt_block_is_asked_for_once_more() -> None:
    pair = Pair()
    pair.corrupt = [{1}]
    whole(pair, spec())
    assert pair.puts == [0, 1, 2, 1]
    assert len(pair.joined) == 1
    assert pair.receiver.num_corrupt_blocks == 1


def test_corrupt_twice_is_a_failure_that_frees_everything() -> None:
    pair = Pair()
    pair.corrupt = [{1}, {1}]
    whole(pair, spec())
    assert not pair.joined
    assert isinstance(pair.ended[0], act.Undelivered)
    assert pair.pool.num_used == 0


def test_an_older_epoch_is_refused_and_a_newer_one_replaces() -> None:
    pair = Pair()
    pair.offer(spec(1, epoch=1))
    pair.deliver()
    pair.offer(spec(2, epoch=2))
    pair.deliver()
    assert isinstance(pair.ended[0], act.Undelivered)
    assert pair.ended[0].key == (7, 1)
    pair.offer(spec(3, epoch=1))
    pair.deliver()
    assert pair.ended[1].key == (7, 3)
    pair.compute(spec(2, epoch=2))
    pair.deliver()
    assert [join.key for join in pair.joined] == [(7, 2)]


@pytest.mark.parametrize(("mover", "held"), [("shm", 3), ("zmq", 0)])
def test_a_silent_writers_blocks_are_quarantined_if_it_writes_by_itself(mover: str, held: int) -> None:
    pair = Pair(movers=(mover,))
    pair.offer(spec())
    pair.deliver()
    pair.now = 10.0
    pair.receiver.tick(pair.now)  # the sender is frozen: no renewal, no answer
    assert pair.pool.num_used == held
    pair.receiver.writer_gone(PREFILL)
    assert pair.pool.num_used == 0


def test_a_writer_of_another_host_that_stays_silent_is_shut_out_and_its_blocks_are_free() -> None:
    pair = Pair(movers=("nixl", "zmq"))
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
    assert pair.pool.num_used == 0
    assert pair.sender.mover_failed(DECODE, "shut out"), "thawed, it finds out by its next put, and goes on by zmq"
    whole(pair, spec(3))
    assert [join.spec.dispatch for join in pair.joined] == [3]


def test_shutting_a_writer_out_ends_its_running_leases_too() -> None:
    pair = Pair(movers=("nixl",))
    pair.offer(spec())
    pair.deliver()
    pair.receiver.writer_shut_out(PREFILL)
    assert pair.pool.num_used == 0
    pair.deliver()
    assert isinstance(pair.ended[0], act.Undelivered)


def test_a_thawed_writer_lets_go_when_asked() -> None:
    pair = Pair(movers=("shm",))
    pair.offer(spec())
    pair.deliver()
    pair.now = 10.0
    pair.receiver.tick(pair.now)
    pair.deliver()
    assert pair.pool.num_used == 0
    assert isinstance(pair.ended[0], act.Undelivered)


def test_meeting_a_newer_incarnation_of_the_same_process_ends_the_quarantine() -> None:
    pair = Pair(movers=("shm",))
    pair.offer(spec())
    pair.deliver()
    pair.now = 10.0
    pair.receiver.tick(pair.now)
    meet = Meet(worker_id="p", incarnation=9, host="h", pid=5, model=MODEL, movers=("shm",))
    pair.receiver.receive(("p", 9), meet.model_copy(update={"pid": 6}), pair.now)  # another process: proves nothing
    assert pair.pool.num_used == 3
    pair.receiver.receive(("p", 10), meet.model_copy(update={"incarnation": 10}), pair.now)
    assert pair.pool.num_used == 0


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
    mover=st.sampled_from(["shm", "zmq"]),
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
    assert len(pair.sender) == 0
    assert pair.receiver.num_granted == pair.receiver.num_waiting == 0
    assert pair.pool.num_used == 0
    ended = {e.key for e in pair.ended}
    assert ended | {(7, i) for i in cancelled} >= {(7, what.dispatch) for what in specs}
    for join in pair.joined:
        assert len(join.blocks) == -(-len(from_u32(join.spec.token_ids)) // BLOCK)


def test_a_mover_that_fails_is_replaced_by_zmq() -> None:
    """What was under way ends and frees its blocks; the peer is met anew, and the next handoff is not by shared memory."""
    pair = Pair(movers=("shm", "zmq"))
    pair.offer(spec(1))
    pair.deliver()
    assert pair.sender.mover_failed(DECODE, "the memory is gone")
    assert pair.sender.num_fallbacks == 1
    pair.deliver()
    assert [type(end) for end in pair.ended] == [act.Undelivered]
    assert pair.pool.num_used == 0
    pair.sender.receive(DECODE, Met(worker_id="d", incarnation=2, mover="shm", num_blocks=16), pair.now)  # an echo of the first meeting
    whole(pair, spec(2, epoch=1))
    assert [join.spec.dispatch for join in pair.joined] == [2]
    assert not pair.sender.mover_failed(DECODE, "the network is gone"), "there is nothing else to fall back to"
    assert pair.sender.num_fallbacks == 1


def test_a_forced_mover_that_fails_is_not_replaced() -> None:
    pair = Pair(movers=("shm",))
    pair.offer(spec(1))
    pair.deliver()
    assert not pair.sender.mover_failed(DECODE, "the memory is gone")
    pair.deliver()
    pair.offer(spec(2, epoch=1))
    messages = [action.message for action in pair.sender.take() if isinstance(action, act.ToPeer)]
    assert [message.movers for message in messages if isinstance(message, Meet)] == [("shm",)]
