"""How fast KV blocks move between two processes, against memcpy and a bare TCP socket in the same run.

    python -m splitserve.bench.handoff.movers [--gib 1] [--rounds 5] [--json bench/results/movers.json]

The sender has one core, the receiver the other. Pools are large and gone through in order, so that nothing is
in a cache. ``scattered`` moves blocks between random places. Each round measures everything one after the
other; ratios are taken within the round, and the median over the rounds is reported: load on the machine then
hits all alike.

    memcpy          one core, from pool to pool, block by block
    shm             the mover
    socket          one bare TCP connection, 2 MiB a call, received straight into the pool (bare_transfer.py)
    4 sockets       as many as the mover opens for large transfers, a thread for each
    ZeroMQ          bare PUSH and PULL, without a copy at the sender: the ``tcp`` mover over ZeroMQ
    tcp plain       the mover, with --plaintext-kv
    tcp             the mover, encrypted
    nixl            the mover, over TCP, where NIXL is installed
    nccl            the mover, played by Gloo
    AES-256-GCM, AES-128-OCB    sealing every block, one core
    checksum        xxh3 of every block, one core
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import zmq
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from ...transport.messages.messages import Met
from ...transport.movers.block_memory import HostMemory
from ...transport.movers.checksum import checksums
from ...transport.movers.interface import Item, Pool, PutSource, TalkingSource
from ...transport.movers.nccl import NcclTarget
from ...transport.movers.nixl import NixlTarget
from ...transport.movers.nixl import is_installed as nixl_is_installed
from ...transport.movers.opening import open_source
from ...transport.movers.shm import SharedPool, ShmTarget
from ...transport.movers.tcp.parcels import RECORD_BYTES
from ...transport.movers.tcp.sealing import GCM, OCB, TAG_BYTES, Seal
from ...transport.movers.tcp.target import TcpTarget
from ..environment import environment
from .bare_transfer import TcpReceiver, TcpSender, ZmqReceiver, ZmqSender

CASES = (
    (2 << 20, "side by side"),
    (200 << 10, "side by side"),
    (200 << 10, "scattered"),
    (64 << 10, "side by side"),
    (64 << 10, "scattered"),
)
NUM_LAYERS = 16
CHUNK_BYTES = 64 << 20  # handed to ``put`` at a time
SECRET = bytes(16)
WRITER = ("p0", 1)


@dataclass(frozen=True)
class Figure:
    """GB/s (1e9 bytes) of wall time; processor seconds of both ends for a GB, which other load on the machine
    changes little. Ratios are to memcpy and to the bare socket of the same case in the same round, median."""

    what: str
    block_bytes: int
    order: str
    gb_per_s: float
    cpu_s_per_gb: float
    of_memcpy: float
    of_memcpy_min: float
    of_memcpy_max: float
    of_socket: float
    of_socket_min: float
    of_socket_max: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of each pool")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    figures = [figure for case in CASES for figure in measure_case(*case, options.gib, options.rounds)]
    print_figures(figures)
    if options.json is not None:
        record = {
            "command": (
                f"python -m splitserve.bench.handoff.movers --gib {options.gib} --rounds {options.rounds}"
            ),
            "load_average": os.getloadavg(),
        }
        result = {"environment": environment(), **record, "figures": [asdict(figure) for figure in figures]}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def measure_case(block_bytes: int, order: str, gib: float, rounds: int) -> list[Figure]:
    """The figures of one block size and order, from a fresh pair of processes."""
    cores = sorted(os.sched_getaffinity(0))
    num_blocks = int(gib * 2**30) // block_bytes
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    arguments = (theirs, num_blocks, block_bytes, order, cores[-1])
    sender = multiprocessing.get_context("spawn").Process(target=send_blocks, args=arguments)
    sender.start()
    theirs.close()  # so that its end is noticed
    os.sched_setaffinity(0, cores[:1])  # before any thread of ZeroMQ's is made: they inherit it
    shared = SharedPool.create(num_blocks * block_bytes)
    pool: Pool = np.frombuffer(shared.buffer, dtype=np.uint8).reshape(num_blocks, NUM_LAYERS, -1)
    shm, tcp = ShmTarget(shared), TcpTarget("tcp://127.0.0.1:*", pool, takes_plain=True)
    bare, four, bare_zmq = TcpReceiver(pool), TcpReceiver(pool, 4), ZmqReceiver(pool)
    met = Met(
        worker_id="d0",
        incarnation=1,
        num_blocks=num_blocks,
        shm_name=shm.shm_name,
        data_address=tcp.data_address("127.0.0.1"),
    )
    ours.send((met, bare.port, four.port, bare_zmq.port))
    nccl, nixl = NcclTarget(HostMemory(pool), pool.shape), NixlTarget(pool) if nixl_is_installed() else None
    words_ours, words_theirs = multiprocessing.get_context("spawn").Pipe()
    ours.send((words_theirs, nccl.address(WRITER), nixl.address(WRITER) if nixl is not None else None))
    bare.accept()
    four.accept()
    ours.recv()  # ready
    receive: dict[str, Callable[[], object]] = {
        "socket": bare.receive_all,
        "4 sockets": four.receive_all,
        "ZeroMQ": bare_zmq.receive_all,
        "tcp plain": lambda: _receive_all(tcp, num_blocks),
        "tcp": lambda: _receive_all(tcp, num_blocks),
        "nccl": lambda: _receive_all(nccl, num_blocks, words_ours),
    }
    alone = {
        "AES-256-GCM": lambda: _seal_all(pool, GCM),
        "AES-128-OCB": lambda: _seal_all(pool, OCB),
        "checksum": lambda: checksums(pool, range(num_blocks)),
    }
    by_writer = ("memcpy", "shm", *(["nixl"] if nixl is not None else []))
    seconds: dict[str, list[float]] = {what: [] for what in (*by_writer, *receive, *alone)}
    cpu = dict.fromkeys(seconds, 0.0)
    for _ in range(rounds):
        for what in by_writer:
            ours.send(what)
            ours_cpu = time.process_time()  # NIXL's thread here takes in what comes over TCP
            wall, theirs_cpu = ours.recv()
            seconds[what].append(wall)
            cpu[what] += theirs_cpu + time.process_time() - ours_cpu
        for what, work in receive.items():
            pool[:] = 0
            for two_sided in (tcp, nccl):
                two_sided.open(1, SECRET, {block: block for block in range(num_blocks)})
            ours.send(what)
            wall, ours_cpu = _timed(work)
            seconds[what].append(wall)
            cpu[what] += ours_cpu + ours.recv()[1]
        for what, work in alone.items():
            wall, ours_cpu = _timed(work)
            seconds[what].append(wall)
            cpu[what] += ours_cpu
    ours.send("verify")
    assert ours.recv() == checksums(pool, range(0, num_blocks, 7)), "blocks arrived corrupt"
    ours.send("end")
    sender.join()
    tcp.close_all()
    nccl.close_all()
    if nixl is not None:
        nixl.close_all()
    shared.close()
    os.sched_setaffinity(0, cores)
    return [
        _figure(what, block_bytes, order, num_blocks * block_bytes, seconds, cpu[what] / rounds)
        for what in seconds
    ]


def _figure(
    what: str, block_bytes: int, order: str, num_bytes: int, seconds: dict[str, list[float]], cpu_s: float
) -> Figure:
    rate = num_bytes / statistics.median(seconds[what]) / 1e9
    ratios = (*_ratio(seconds["memcpy"], seconds[what]), *_ratio(seconds["socket"], seconds[what]))
    return Figure(what, block_bytes, order, rate, cpu_s / num_bytes * 1e9, *ratios)


def _ratio(base: list[float], ours: list[float]) -> tuple[float, float, float]:
    """Median, least, most."""
    ratios = [theirs / mine for theirs, mine in zip(base, ours, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def _receive_all(target: TcpTarget | NcclTarget, num_blocks: int, words: Connection | None = None) -> None:
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


def _seal_all(pool: Pool, mode: int) -> None:
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
        connection.send(checksums(pool, sources[::7]) if what == "verify" else _timed(ways[what]))
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
        if words is not None and isinstance(source, TalkingSource):
            for word in source.take_messages():
                words.send(word)
            while words.poll():
                source.receive(words.recv())
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


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall time, and of the processor in all threads."""
    start, start_cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - start_cpu


def print_figures(figures: list[Figure]) -> None:
    table = Table(
        "what",
        "block KiB",
        "order",
        "GB/s",
        "CPU s/GB",
        "of memcpy",
        "of socket",
        title="KV blocks between two processes",
    )
    for figure in figures:
        of_memcpy = f"{figure.of_memcpy:.2f} ({figure.of_memcpy_min:.2f} - {figure.of_memcpy_max:.2f})"
        of_socket = f"{figure.of_socket:.2f} ({figure.of_socket_min:.2f} - {figure.of_socket_max:.2f})"
        rate, cpu = f"{figure.gb_per_s:.2f}", f"{figure.cpu_s_per_gb:.2f}"
        table.add_row(
            figure.what, str(figure.block_bytes >> 10), figure.order, rate, cpu, of_memcpy, of_socket
        )
    Console().print(table)


if __name__ == "__main__":
    main()
