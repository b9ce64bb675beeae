"""Both ends of the KV handoff, joined by pipes that a test may clog."""

from __future__ import annotations

from collections.abc import Callable

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.transport.handoff import protocol as act
from splitserve.transport.handoff.layer_slicing import WHOLE_BLOCKS, LayerSlicing
from splitserve.transport.handoff.protocol import HandoffTimes
from splitserve.transport.handoff.receiver import HandoffReceiver
from splitserve.transport.handoff.sender import HandoffSender
from splitserve.transport.messages.blocks import chain, root_hash
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import (
    Meet,
    Message,
    ModelIdentity,
    Peer,
    Placed,
    RequestSpec,
    SamplingParams,
    u32,
    u64,
)
from splitserve.transport.movers.interface import MoverEndpoints

BLOCK, NUM_LAYERS = 4, 6


MODEL = ModelIdentity(kv_name="m", dtype="float32", block_size=BLOCK, cache_map=states(1, 64), block_bytes=64)


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
        sampling=SamplingParams(max_tokens=9),
        deadline_s=60.0,
    )


class Pair:
    """A sender and a receiver, a clock, and the pipes between them. Own block ``i`` of the sender holds the
    prompt's block ``i``."""

    def __init__(
        self,
        movers: tuple[str, ...] = ("tcp",),
        num_blocks: int = 16,
        model: ModelIdentity = MODEL,
        slicing: LayerSlicing = WHOLE_BLOCKS,
        own: ModelIdentity = MODEL,
    ) -> None:
        """``model``: the sender's; ``own``: the receiver's."""
        self.now = 0.0
        self.pool = BlockManager(num_blocks)
        self.room = (8, 0)
        meet = Meet(worker_id="p", incarnation=1, host="h", pid=5, model=model, movers=movers)
        self.sender = HandoffSender(meet, TIMES, slicing)
        endpoints = MoverEndpoints(("shm", "nixl", "tcp"), "h")
        self.receiver = HandoffReceiver(
            DECODE, own, self.pool, endpoints, lambda: self.room, lambda: b"s" * 16, TIMES
        )
        self.to_receiver: list[Message] = []
        self.to_sender: list[Message] = []
        self.corrupt: list[set[int]] = []  # positions that fail the next check, and the one after it
        self.joined: list[act.Join] = []
        self.puts: list[int] = []  # positions put whole, or to the last layer
        self.slices: list[
            tuple[int, int, tuple[int, int] | None]
        ] = []  # (first position, number of blocks, layers)
        self.checked: list[int] = []  # positions, as they were verified
        self.ended: list[act.Delivered | act.Undelivered] = []
        self.opened: list[str] = []  # movers, by the sender

    def collect(self) -> None:
        """Turns both sides' actions into messages under way and into what the movers do."""
        for action in self.sender.take():
            if isinstance(action, act.ToPeer):
                self.to_receiver.append(action.message)
            elif isinstance(action, act.SendHandoff):
                sums = u64(action.source_blocks)
                self.to_receiver.append(action.message(sums, self.now))
            elif isinstance(action, act.SendPlaced):
                self.to_receiver.append(
                    Placed(lease=action.lease, first=action.first, checksums=u64(action.source_blocks))
                )
            elif isinstance(action, act.Put):
                self.slices.append((action.items[0][0], len(action.items), action.layers))
                if action.layers is not None and action.layers[1] < NUM_LAYERS:
                    continue  # arrives with its last layer
                for position, _, _ in action.items:
                    self.puts.append(position)
                    self.receiver.arrived(action.lease, position)
            elif isinstance(action, act.OpenMover):
                self.opened.append(action.met.mover)
            elif isinstance(action, act.Delivered | act.Undelivered):
                self.ended.append(action)
        while taken := self.receiver.take():
            self._carry_out(taken)
        self.receiver.leases.free_closed()

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

    def compute(self, what: RequestSpec, num_cached_tokens: int = 0) -> None:
        blocks = list(range(-(-what.num_tokens // BLOCK)))
        self.sender.blocks_ready((7, what.dispatch), blocks, len(blocks))
        self.sender.finish((7, what.dispatch), blocks, 42, None, self.now, num_cached_tokens)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.sender.tick(self.now)
        self.receiver.tick(self.now)


def whole(pair: Pair, what: RequestSpec, num_cached_tokens: int = 0) -> None:
    pair.offer(what)
    pair.deliver()
    pair.compute(what, num_cached_tokens)
    pair.deliver()
