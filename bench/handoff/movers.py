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

import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

from ...transport.messages.messages import Met
from ...transport.movers.block_memory import HostMemory
from ...transport.movers.checksum import checksums
from ...transport.movers.interface import Pool
from ...transport.movers.nixl import NixlTarget
from ...transport.movers.nixl import is_installed as nixl_is_installed
from ...transport.movers.opening import nccl_target
from ...transport.movers.shm import SharedPool, ShmTarget
from ...transport.movers.tcp.target import TcpTarget
from ...transport.movers.tcp.wire import GCM, OCB
from ..environment import environment, option_parser, write_record
from .bare_transfer import TcpReceiver, ZmqReceiver
from .moved_blocks import NUM_LAYERS, SECRET, WRITER, receive_all, seal_all, send_blocks, timed

CASES = (
    (2 << 20, "side by side"),
    (200 << 10, "side by side"),
    (200 << 10, "scattered"),
    (64 << 10, "side by side"),
    (64 << 10, "scattered"),
)


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--gib", type=float, default=1.0, help="size of each pool")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    figures = [figure for case in CASES for figure in measure_case(*case, options.gib, options.rounds)]
    print(json.dumps(figures, indent=1))
    write_record(options.json, {"environment": environment(), "figures": figures})


def measure_case(block_bytes: int, order: str, gib: float, rounds: int) -> list[dict[str, object]]:
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
    nccl = nccl_target(HostMemory(pool), pool.shape)
    nixl = NixlTarget(pool) if nixl_is_installed() else None
    words_ours, words_theirs = multiprocessing.get_context("spawn").Pipe()
    ours.send((words_theirs, nccl.address(WRITER), nixl.address(WRITER) if nixl is not None else None))
    bare.accept()
    four.accept()
    ours.recv()  # ready
    receive: dict[str, Callable[[], object]] = {
        "socket": bare.receive_all,
        "4 sockets": four.receive_all,
        "ZeroMQ": bare_zmq.receive_all,
        "tcp plain": lambda: receive_all(tcp, num_blocks),
        "tcp": lambda: receive_all(tcp, num_blocks),
        "nccl": lambda: receive_all(nccl, num_blocks, words_ours),
    }
    alone = {
        "AES-256-GCM": lambda: seal_all(pool, GCM),
        "AES-128-OCB": lambda: seal_all(pool, OCB),
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
            wall, ours_cpu = timed(work)
            seconds[what].append(wall)
            cpu[what] += ours_cpu + ours.recv()[1]
        for what, work in alone.items():
            wall, ours_cpu = timed(work)
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
) -> dict[str, object]:
    """GB/s (1e9 bytes) of wall time; processor seconds of both ends for a GB, which other load on the machine
    changes little; ratios."""
    ratios = {
        f"of_{base}{suffix}": ratio
        for base in ("memcpy", "socket")
        for suffix, ratio in _ratio(seconds[base], seconds[what]).items()
    }
    return {
        "what": what,
        "block_bytes": block_bytes,
        "order": order,
        "gb_per_s": num_bytes / statistics.median(seconds[what]) / 1e9,
        "cpu_s_per_gb": cpu_s / num_bytes * 1e9,
        **ratios,
    }


def _ratio(base: list[float], ours: list[float]) -> dict[str, float]:
    """Ratios to ``base`` of the same rounds: the median without a suffix, and both extremes."""
    ratios = [theirs / mine for theirs, mine in zip(base, ours, strict=True)]
    return {"": statistics.median(ratios), "_min": min(ratios), "_max": max(ratios)}


if __name__ == "__main__":
    main()
