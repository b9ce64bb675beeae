"""What the control channels cost: round trips and messages a second between two processes, plain and
encrypted.

    python -m splitserve.bench.control [--seconds 2] [--json bench/results/control.json]

The message is one decode step of 64 rows, validated on arrival. The receiver answers each (round trip) or
counts them (flood).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

import zmq

from ..transport.channels.channels import DealerChannel, RouterChannel
from ..transport.channels.keys import ClusterKey, new_key
from ..transport.messages.codec import decode, encode
from ..transport.messages.messages import FROM_COORDINATOR, FROM_WORKER, StepTokens, Welcome, u32
from .environment import environment, option_parser, write_record

ROWS = list(range(64))
STEP = StepTokens(
    coordinator=1 << 60, dispatches=u32(ROWS), indices=u32(ROWS), tokens=u32(ROWS), finished={3: "stop"}
)
ANSWER = Welcome(coordinator=1, heartbeat_s=0.5)


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    options = parser.parse_args()
    codec_us = measure_codec()
    figures = [measure("plain", None, options.seconds), measure("curve", new_key(), options.seconds)]
    found = {"codec_us": codec_us, "figures": figures}
    print(json.dumps(found, indent=1))
    write_record(options.json, {"environment": environment(), **found})


def measure_codec() -> dict[str, float]:
    """Best microseconds to encode and to decode the step, over many short runs."""
    wire = encode(STEP)
    ways = {"encode": lambda: encode(STEP), "decode": lambda: decode(wire, FROM_WORKER)}
    return {name: min(_seconds_each(way) for _ in range(200)) * 1e6 for name, way in ways.items()}


def _seconds_each(way: object, count: int = 100) -> float:
    assert callable(way)
    start = time.perf_counter()
    for _ in range(count):
        way()
    return (time.perf_counter() - start) / count


def measure(name: str, key: ClusterKey | None, seconds: float) -> dict[str, object]:
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(theirs, key, seconds, cores[-1]))
    worker.start()
    os.sched_setaffinity(0, cores[:1])
    with RouterChannel.bind("tcp://127.0.0.1:*", key, FROM_WORKER) as channel:
        ours.send(channel.address)
        round_trips = _answer_until(channel, ours)
        rate = _count_until(channel, ours)
    worker.join()
    os.sched_setaffinity(0, cores)
    percentiles = statistics.quantiles(round_trips, n=100)
    return {
        "channel": name,
        "round_trip_us_p50": percentiles[49] * 1e6,
        "round_trip_us_p99": percentiles[98] * 1e6,
        "messages_per_s": rate,
    }


def _answer_until(channel: RouterChannel, connection: Connection) -> list[float]:
    """Answers every message until the worker reports its round trips."""
    poller = zmq.Poller()
    poller.register(channel.socket, zmq.POLLIN)
    while not connection.poll():
        if poller.poll(10):
            for peer, _ in channel.receive(256):
                channel.send(peer, ANSWER)
    round_trips: list[float] = connection.recv()
    return round_trips


def _count_until(channel: RouterChannel, connection: Connection) -> float:
    """Messages a second while the worker floods."""
    poller = zmq.Poller()
    poller.register(channel.socket, zmq.POLLIN)
    poller.poll()
    start, count = time.perf_counter(), 0
    while not connection.poll():
        if poller.poll(10):
            count += len(channel.receive(256))
    return count / (time.perf_counter() - start)


def work(connection: Connection, key: ClusterKey | None, seconds: float, core: int) -> None:
    """The other process: measures round trips, then floods."""
    os.sched_setaffinity(0, {core})
    with DealerChannel.connect(connection.recv(), b"w0", key, FROM_COORDINATOR) as channel:
        _round_trip(channel)  # connects
        end, round_trips = time.perf_counter() + seconds, []
        while time.perf_counter() < end:
            round_trips.append(_round_trip(channel))
        connection.send(round_trips)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            if not channel.send(STEP):
                channel.socket.poll(10, zmq.POLLOUT)
        connection.send("end")


def _round_trip(channel: DealerChannel) -> float:
    start = time.perf_counter()
    channel.send(STEP)
    while not channel.receive(1):
        channel.socket.poll(1000)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
