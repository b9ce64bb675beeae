"""The two ends of a mover under measurement: a process that sends blocks, and what receives them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection

import numpy as np
import zmq
from msgspec.structs import replace

from ...transport.messages.messages import Met
from ...transport.movers.checksum import checksums
from ...transport.movers.interface import Item, Pool, PutSource, as_talking_source
from ...transport.movers.nccl import NcclTarget
from ...transport.movers.opening import open_source
from ...transport.movers.tcp.target import TcpTarget
from ...transport.movers.tcp.wire import RECORD_BYTES, TAG_BYTES, Seal
from .bare_transfer import TcpSender, ZmqSender

NUM_LAYERS = 16
CHUNK_BYTES = 64 << 20  # handed to ``put`` at a time
SECRET = bytes(16)
WRITER = ("p0", 1)


def receive_all(target: TcpTarget | NcclTarget, num_blocks: int, words: Connection | None = None) -> None:
    """``words``: what the target's control channel would carry."""
    poller = zmq.Poller()
    poller.register(target.fd, zmq.POLLIN)
    if words is not None:
        poller.register(words.fileno(), zmq.POLLIN)
    arrived = 0
    while arrived < num_blocks:
        poller.poll()
        if isinstance(target, NcclTarget) and words is not None:
            while words.poll():
                target.receive(WRITER, words.recv())
            for _, word in target.take_messages():
                words.send(word)
        arrived += len(target.poll(num_blocks))


def seal_all(pool: Pool, mode: int) -> None:
    seal, sealed = Seal(bytes(32), mode), memoryview(bytearray(RECORD_BYTES + TAG_BYTES))
    content = pool.reshape(-1).data
    for start in range(0, len(content), RECORD_BYTES):
        record = content[start : start + RECORD_BYTES]
        seal.close_into(record, sealed[: len(record) + TAG_BYTES])


def send_blocks(connection: Connection, num_blocks: int, block_bytes: int, order: str, core: int) -> None:
    """The sending process: obeys commands over ``connection``."""
    os.sched_setaffinity(0, {core})
    met, tcp_port, four_port, zmq_port = connection.recv()
    rng = np.random.default_rng(0)
    pool: Pool = np.frombuffer(bytearray(rng.bytes(num_blocks * block_bytes)), dtype=np.uint8).reshape(
        num_blocks, NUM_LAYERS, -1
    )
    copy = np.ones_like(pool)
    ending = ExitStack()
    sources = list(range(num_blocks)) if order == "side by side" else rng.permutation(num_blocks).tolist()
    size = max(1, CHUNK_BYTES // block_bytes)
    chunks = [
        [(i, sources[i], i) for i in range(start, min(num_blocks, start + size))]
        for start in range(0, num_blocks, size)
    ]
    ways: dict[str, Callable[[], None]] = {
        "memcpy": lambda: _copy_all(pool, copy, sources),
        "shm": _putting(ending, replace(met, mover="shm"), pool, chunks),
        "tcp plain": _putting(ending, replace(met, mover="tcp"), pool, chunks, plain_kv=True),
        "tcp": _putting(ending, replace(met, mover="tcp"), pool, chunks),
        "socket": TcpSender(tcp_port, pool).send_all,
        "4 sockets": TcpSender(four_port, pool, 4).send_all,
        "ZeroMQ": ZmqSender(zmq_port, pool).send_all,
    }
    words, nccl_address, nixl_address = connection.recv()
    ways["nccl"] = _putting(
        ending, replace(met, mover="nccl", mover_address=nccl_address), pool, chunks, True, words
    )
    if nixl_address is not None:
        ways["nixl"] = _putting(
            ending, replace(met, mover="nixl", mover_address=nixl_address), pool, chunks, True
        )
    ways["shm"]()  # maps every page once
    connection.send("ready")
    while (what := connection.recv()) != "end":
        connection.send(checksums(pool, sources[::7]) if what == "verify" else timed(ways[what]))
    ending.close()


def _copy_all(pool: Pool, copy: Pool, sources: list[int]) -> None:
    for target, source in enumerate(sources):
        np.copyto(copy[target], pool[source])


def _putting(
    ending: ExitStack,
    met: Met,
    pool: Pool,
    chunks: list[list[Item]],
    plain_kv: bool = False,
    words: Connection | None = None,
) -> Callable[[], None]:
    opened: list[PutSource] = []

    def open_now() -> None:
        opened.append(open_source(met, pool, plain_kv))
        ending.callback(opened[0].close)

    if words is None:  # one that talks meets its peer when that listens
        open_now()

    def turn(source: PutSource) -> None:
        if words is not None and (talking := as_talking_source(source)) is not None:
            for word in talking.take_messages():
                words.send(word)
            while words.poll():
                talking.receive(words.recv())
        source.poll()
        time.sleep(0.0005)

    def put_all() -> None:
        if not opened:
            open_now()
        source = opened[0]
        for items in chunks:
            source.put(1, SECRET, items)
            while source.pending() * pool[0].nbytes > CHUNK_BYTES // 2:
                turn(source)
        while source.pending():
            turn(source)
        source.poll()

    return put_all


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall time, and of the processor in all threads."""
    start, start_cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - start_cpu
