"""Measures what moves KV blocks on this machine: the mover with its checksums, and a message from one process to another."""

from __future__ import annotations

import statistics
import time

import numpy as np
import zmq

from ...engine.latency_profile import HandoffModel
from ...transport.channels import DealerChannel, RouterChannel
from ...transport.messages import Alive
from ...transport.movers.checksum import RunningChecksums, block_checksum
from ...transport.movers.shm import SharedPool, ShmSource, ShmTarget
from .fit import StepPoint, fit_steps

POOL_BYTES = 64 << 20
REPEATS = 9


def measure_handoff(block_bytes: int, num_layers: int) -> HandoffModel:
    """The ``shm`` mover between two pools of blocks like these. What a put costs is told from its size by puts of one and of many
    blocks."""
    num_blocks = max(2, POOL_BYTES // block_bytes)
    shape = (num_blocks, num_layers, -(-block_bytes // num_layers))
    num_bytes = int(np.prod(shape))
    own = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8).reshape(shape)
    shared = SharedPool.create(num_bytes)
    target = ShmTarget(shared)
    theirs = np.frombuffer(shared.buffer, np.uint8, num_bytes).reshape(shape)
    source, sums = ShmSource(target.shm_name, num_blocks, own), RunningChecksums(own)
    points, checks = [], []
    for count in sorted({1, num_blocks // 8 or 1, num_blocks}):
        blocks = list(range(count))
        items = [(i, i, i) for i in blocks]
        puts = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            source.put(1, b"", items)
            sums.add(blocks)
            puts.append(time.perf_counter() - began)
            began = time.perf_counter()
            for block in blocks:
                block_checksum(theirs[block])
            checks.append(count * own[0].nbytes / (time.perf_counter() - began))
        points.append(StepPoint(count * own[0].nbytes, 0, 1, statistics.median(puts)))
    source.close()
    model = fit_steps(points, [points[0].units, points[-1].units], ())
    (x0, y0), (x1, y1) = model.pieces[0].curve
    rate = (x1 - x0) / max(y1 - y0, 1e-9)
    return HandoffModel(
        put_s=max(0.0, y0 - x0 / rate),
        bytes_per_s=rate,
        message_s=measure_message(),
        check_bytes_per_s=statistics.median(checks),
        residuals=model.residuals,
    )


def measure_message(num_messages: int = 200) -> float:
    """Seconds that a small message takes from one channel to another of this machine, both in this process."""
    router = RouterChannel.bind("tcp://127.0.0.1:*", None, (Alive,))
    dealer = DealerChannel.connect(router.address, b"profile", None, (Alive,))
    poller = zmq.Poller()
    poller.register(router.socket, zmq.POLLIN)
    times = []
    for i in range(num_messages + 20):
        began = time.perf_counter()
        dealer.send(Alive(coordinator=1))
        while not router.receive(1):
            poller.poll(1000)
        if i >= 20:
            times.append(time.perf_counter() - began)
    dealer.close()
    router.close()
    return statistics.median(times)
