"""Measures what moves KV blocks on this machine: each mover with its checksums, and a message from one
process to another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import count as count_up

import numpy as np
import zmq
from numpy.typing import NDArray

from ...engine.latency_profile import HandoffModel
from ...transport.channels.channels import DealerChannel, RouterChannel
from ...transport.messages.messages import SECRET_BYTES, Alive
from ...transport.movers.checksum import RunningChecksums, block_checksum
from ...transport.movers.shm import SharedPool, ShmSource, ShmTarget
from ...transport.movers.tcp.source import TcpSource
from ...transport.movers.tcp.target import TcpTarget
from ..errors import ProfilingError
from .fit import PutPoint, fit_puts
from .measure import middle_of, uncertainty_of

POOL_BYTES = 64 << 20
MIN_REPEATS, MAX_REPEATS = 9, 100
ARRIVED_S = 30.0
Blocks = NDArray[np.uint8]  # [num_blocks, num_layers, bytes]


def measure_movers(block_bytes: int, num_layers: int, precision: float = 0.02) -> dict[str, HandoffModel]:
    """Measure the movers that any two workers of this machine share, between two pools of such blocks.

    Each put is repeated until its time is known to ``precision`` (relative, 95%), up to ``MAX_REPEATS``
    times."""
    num_blocks = max(2, POOL_BYTES // block_bytes)
    shape = (num_blocks, num_layers, -(-block_bytes // num_layers))
    own = np.random.default_rng(0).integers(0, 256, int(np.prod(shape)), np.uint8).reshape(shape)
    message_s = measure_message()
    return {"shm": _shm(own, message_s, precision), "tcp": _tcp(own, message_s, precision)}


def _shm(own: Blocks, message_s: float, precision: float) -> HandoffModel:
    """Measure one copy and its checksum, then the receiver's check."""
    shared = SharedPool.create(own.nbytes)
    target = ShmTarget(shared)
    theirs = np.frombuffer(shared.buffer, np.uint8, own.nbytes).reshape(own.shape)
    source, sums, num_layers = ShmSource(target.shm_name, len(own), own), RunningChecksums(own), own.shape[1]

    def put(count: int, layers: int) -> None:
        for first, size in slices(num_layers, layers):
            source.put(1, b"", [(i, i, i) for i in range(count)], first, size)
            sums.add(range(count), first, size)

    found = _model(own, put, theirs, message_s, precision)
    source.close()
    return found


def _tcp(own: Blocks, message_s: float, precision: float) -> HandoffModel:
    """Over loopback, enciphered, from the put until all of it has arrived. Both ends are in this process and
    share its cores."""
    theirs = np.zeros_like(own)
    target = TcpTarget("tcp://127.0.0.1:*", theirs)
    source, sums, num_layers = (
        TcpSource(target.data_address("127.0.0.1"), own),
        RunningChecksums(own),
        own.shape[1],
    )
    poller = zmq.Poller()
    poller.register(target.fd, zmq.POLLIN)
    leases = count_up(1)

    def put(count: int, layers: int) -> None:
        lease, secret = next(leases), bytes(SECRET_BYTES)
        target.open(lease, secret, {i: i for i in range(count)})
        for first, size in slices(num_layers, layers):
            source.put(lease, secret, [(i, i, i) for i in range(count)], first, size)
            sums.add(range(count), first, size)
        left, end = count, time.monotonic() + ARRIVED_S
        while left:
            if time.monotonic() > end:
                raise ProfilingError(
                    f"{left} of {count} blocks did not arrive over loopback within {ARRIVED_S:g} "
                    "s; profile on an idle machine"
                )
            source.poll()
            poller.poll(100)
            left -= len(target.poll(left))
        target.close(lease)

    put(1, num_layers)  # it connects
    try:
        return _model(own, put, theirs, message_s, precision)
    finally:
        source.close()
        target.close_all()


def _model(
    own: Blocks, put: Callable[[int, int], None], theirs: Blocks, message_s: float, precision: float
) -> HandoffModel:
    """Fit a mover's model to puts of one and of many blocks, whole and in slices.

    ``put`` gets the number of blocks, and the number of layers of each of its puts."""
    points: list[PutPoint] = []
    checks: list[float] = []
    for count, layers in _designed_puts(len(own), own.shape[1]):
        num_bytes, num_puts = count * own[0].nbytes, -(-own.shape[1] // layers)
        puts = repeated(partial(seconds_of, partial(put, count, layers)), precision)
        checks += [num_bytes / seconds_of(partial(_check, theirs[:count])) for _ in range(MIN_REPEATS)]
        points.append(
            PutPoint(
                num_bytes,
                num_puts,
                num_puts * count if num_puts > 1 else 0,
                statistics.fmean(middle_of(puts)),
            )
        )
    return fit_puts(points).model_copy(
        update={"message_s": message_s, "check_bytes_per_s": statistics.median(checks)}
    )


def _designed_puts(num_blocks: int, num_layers: int) -> list[tuple[int, int]]:
    """How many blocks, and how many layers a put: all blocks are put whole only, for the bytes take the time
    then."""
    some = num_blocks // 8 or 1
    whole = {(1, num_layers), (some, num_layers), (num_blocks, num_layers)}
    return sorted(whole | {(count, layers) for count in (1, some) for layers in (1, -(-num_layers // 4))})


def slices(num_layers: int, layers: int) -> list[tuple[int, int]]:
    """(First layer, number of layers) of each slice of at most ``layers`` layers."""
    return [(first, min(layers, num_layers - first)) for first in range(0, num_layers, layers)]


def _check(blocks: Blocks) -> None:
    for block in blocks:
        block_checksum(block)


def seconds_of(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def repeated(measure: Callable[[], float], precision: float) -> list[float]:
    """Values of repeated calls, until their mean is known to ``precision`` (relative, 95%), at most
    ``MAX_REPEATS``."""
    found: list[float] = []
    while len(found) < MIN_REPEATS or (len(found) < MAX_REPEATS and uncertainty_of(found) > precision):
        found.append(measure())
    return found


def measure_message() -> float:
    """Seconds that a small message takes from one channel to another of this machine, both in this
    process."""
    router = RouterChannel.bind("tcp://127.0.0.1:*", None, (Alive,))
    dealer = DealerChannel.connect(router.address, b"profile", None, (Alive,))
    poller = zmq.Poller()
    poller.register(router.socket, zmq.POLLIN)
    times = []
    for i in range(220):
        began = time.perf_counter()
        dealer.send(Alive(coordinator=1))
        while not router.receive(1):
            poller.poll(1000)
        if i >= 20:
            times.append(time.perf_counter() - began)
    dealer.close()
    router.close()
    return statistics.median(times)
