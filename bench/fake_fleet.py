"""Many prefill and decode workers without engines, in one process: each has a connection of its own to a real
coordinator, beats, publishes a prefix cache and answers at once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
import zmq

from ..transport.channels.coordinator_link import identity_of
from ..transport.channels.keys import ClusterKey
from ..transport.messages.blocks import chain, root_hash
from ..transport.messages.codec import decode, encode
from ..transport.messages.messages import (
    FROM_COORDINATOR,
    BlockEvents,
    Cancel,
    Message,
    Prefill,
    Role,
    Welcome,
)
from .fake_workers import MODEL, Rows, fake_hello, fake_load

NUM_BLOCKS = 1 << 15
SIZES = {"num_blocks": NUM_BLOCKS, "max_num_seqs": 256, "max_batch_tokens": 8192}
HASH_BYTES = 16
COUNTERS = (
    "output_tokens",
    "step_sequences",
    "draft_tokens",
    "accepted_tokens",
    "mtp_draft_tokens",
    "mtp_accepted_tokens",
    "preemptions",
    "corrupt_blocks",
    "handed_over",
    "mover_fallbacks",
)


@dataclass(eq=False)
class FakeWorker:
    """One of them."""

    name: str
    role: Role
    socket: zmq.Socket[bytes]
    coordinator: int = 0  # its incarnation, once it has answered
    num_cache_reports: int = 0
    rows: Rows = field(default_factory=Rows)

    def send(self, *messages: Message) -> int:
        """Return how many."""
        self.socket.send_multipart([encode(message) for message in messages])
        return len(messages)


class FakeFleet:
    """Half of them prefill workers. ``num_sent`` counts messages to the coordinator."""

    def __init__(self, coordinator: str, key: ClusterKey, num_workers: int, token: int) -> None:
        """``token``: each output repeats it."""
        self._tokens, self._context = np.array([token], dtype="<u4"), zmq.Context()
        self._context.max_sockets = num_workers + 1
        self._poller = zmq.Poller()
        self.num_sent = 0
        self.last_prompt = b""  # hashes of its blocks
        self.workers: list[FakeWorker] = []
        self._by_socket: dict[zmq.Socket[bytes], FakeWorker] = {}
        self._decodes: dict[str, FakeWorker] = {}
        roles: tuple[Role, Role] = ("prefill", "decode")
        for number in range(num_workers):
            role = roles[number % 2]
            name = f"{role}-{number // 2}"
            socket = self._context.socket(zmq.DEALER)
            socket.linger, socket.routing_id = 0, identity_of(name, 1)
            socket.curve_serverkey = socket.curve_publickey = key.public
            socket.curve_secretkey = key.secret
            socket.connect(coordinator)
            worker = FakeWorker(name, role, socket)
            self._poller.register(socket, zmq.POLLIN)
            self._by_socket[socket] = worker
            self.workers.append(worker)
            if role == "decode":
                self._decodes[name] = worker
            self.num_sent += worker.send(fake_hello(name, role, 1, **SIZES))

    @property
    def num_steps(self) -> int:
        """Steps of all decode workers."""
        return sum(worker.rows.num_steps for worker in self.workers)

    def close(self) -> None:
        for worker in self.workers:
            worker.socket.close()
        self._context.term()

    # --- what they do by themselves ----------------------------------------------------------------------

    def beat(self) -> None:
        """Send a heartbeat of each worker."""
        for worker in self.workers:
            counters = dict.fromkeys(COUNTERS, float(worker.rows.num_steps))
            reports = {"num_cache_reports": worker.num_cache_reports, "counters": counters}
            self.num_sent += worker.send(fake_load(worker.name, 1, worker.rows, NUM_BLOCKS, **reports))

    def store(self, hashes: bytes) -> None:
        """Add these blocks to the prefix cache of each worker."""
        for worker in self.workers:
            self._publish(worker, hashes)

    def store_own(self, num_blocks: int) -> None:
        """Add as many blocks that no other worker has."""
        for worker in self.workers:
            self._publish(worker, os.urandom(num_blocks * HASH_BYTES))

    def step(self) -> int:
        """One token of every sequence. Return how many."""
        count = 0
        for worker in self._decodes.values():
            if len(worker.rows):
                count += len(worker.rows)
                self.num_sent += worker.send(worker.rows.step(worker.coordinator, self._tokens))
        return count

    # --- messages from the coordinator -------------------------------------------------------------------

    def poll(self) -> None:
        """Handle what has arrived."""
        for socket, _ in self._poller.poll(0):
            worker = self._by_socket[socket]
            while True:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                for frame in frames:
                    self._receive(worker, decode(frame, FROM_COORDINATOR))

    def _receive(self, worker: FakeWorker, message: Message) -> None:
        if isinstance(message, Welcome):
            worker.coordinator = message.coordinator
        elif isinstance(message, Prefill):
            self._answer(worker, message)
        elif isinstance(message, Cancel):
            worker.rows.drop(message)

    def _answer(self, worker: FakeWorker, message: Prefill) -> None:
        spec, decode = message.spec, self._decodes[message.decode.worker_id]
        first, joined = decode.rows.begin(message, self._tokens)
        if joined is not None:
            self.num_sent += decode.send(joined)
        self.num_sent += worker.send(first)
        self.last_prompt = b"".join(
            chain(root_hash(MODEL.kv_name, spec.salt, spec.adapter), spec.token_ids, MODEL.block_size)
        )

    # --- messages ------------------------------------------------------------------------------------------

    def _publish(self, worker: FakeWorker, hashes: bytes) -> None:
        worker.num_cache_reports += 1
        self.num_sent += worker.send(
            BlockEvents(worker_id=worker.name, incarnation=1, number=worker.num_cache_reports, stored=hashes)
        )
