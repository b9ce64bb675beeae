"""The tcp mover's own sealing beside TLS 1.3 of Python's standard library, over loopback, by turns.

    python -m splitserve.bench.handoff.tls [--mib 512] [--rounds 9] [--json bench/results/tls.json]

Sender and receiver are two processes with a core each. The mover does its whole work (leases, parcels, 256
KiB records). TLS only sends the pool's bytes over one connection, straight from and into the pool: an upper
bound for a mover over TLS. AES-GCM in both, or the mover's OCB where its processor is quicker with that."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import socket
import ssl
import statistics
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ...transport.movers.interface import Pool
from ...transport.movers.tcp.source import TcpSource
from ...transport.movers.tcp.target import TcpTarget
from ...transport.movers.tcp.wire import GCM, quickest_cipher
from ..environment import environment, option_parser, write_record

BLOCK_BYTES, NUM_LAYERS, PIECE_BYTES, SECRET = 2 << 20, 16, 8 << 20, bytes(16)
CERTIFICATE = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=bench -days 2"


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument("--mib", type=int, default=512, help="size of each pool")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    found = measure(options.mib << 20, options.rounds)
    print(json.dumps(found, indent=1))
    write_record(options.json, {"environment": environment(), **found})


def measure(num_bytes: int, rounds: int) -> dict[str, Any]:
    """GB/s and processor seconds a GB (sender, receiver) of every round; TLS's share of the mover, median
    over rounds."""
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    sender = multiprocessing.get_context("spawn").Process(
        target=send, args=(theirs, num_bytes, cores[-1]), daemon=True
    )
    sender.start()
    os.sched_setaffinity(0, cores[:1])
    pool: Pool = np.zeros((num_bytes // BLOCK_BYTES, NUM_LAYERS, BLOCK_BYTES // NUM_LAYERS), np.uint8)
    target, listener = TcpTarget("tcp://127.0.0.1:*", pool), socket.create_server(("127.0.0.1", 0))
    ours.send((target.data_address("127.0.0.1"), listener.getsockname()[1]))
    stream = server_context().wrap_socket(listener.accept()[0], server_side=True)
    cipher = stream.cipher()
    taken: dict[str, list[tuple[float, float, float]]] = {"mover": [], "tls": []}
    for number in range(-1, rounds):  # round -1 touches every page and is dropped
        for what, figures in taken.items():
            began, cpu = time.perf_counter(), time.process_time()
            target.open(1, SECRET, {block: block for block in range(len(pool))})
            ours.send(what)
            receive_blocks(target, len(pool)) if what == "mover" else receive_stream(stream, pool)
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            of_sender: float = ours.recv()
            if number >= 0:
                figures.append((num_bytes / wall / 1e9, of_sender / num_bytes * 1e9, cpu / num_bytes * 1e9))
    ours.send("end")
    sender.join()
    target.close_all()
    os.sched_setaffinity(0, cores)
    rows = list(zip(taken["mover"], taken["tls"], strict=True))
    return {
        "ciphers": {
            "mover": "AES-256-GCM" if quickest_cipher() == GCM else "AES-128-OCB",
            "tls": cipher and cipher[0],
        },
        "gb_per_s, sender and receiver cpu_s_per_gb": taken,
        "tls throughput of the mover's": statistics.median(tls[0] / mover[0] for mover, tls in rows),
        "tls work of the mover's, by processor time": statistics.median(
            sum(mover[1:]) / sum(tls[1:]) for mover, tls in rows
        ),
    }


def send(connection: Connection, num_bytes: int, core: int) -> None:
    """The sending process."""
    os.sched_setaffinity(0, {core})
    contents = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    pool: Pool = contents.reshape(num_bytes // BLOCK_BYTES, NUM_LAYERS, -1)
    address, port = connection.recv()
    source = TcpSource(address, pool)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    stream = context.wrap_socket(socket.create_connection(("127.0.0.1", port)))
    while (what := connection.recv()) != "end":
        cpu = time.process_time()
        if what == "mover":
            source.put(1, SECRET, [(block, block, block) for block in range(len(pool))])
            while source.pending():
                time.sleep(0.001)
            source.poll()
        else:
            for start in range(0, num_bytes, PIECE_BYTES):
                stream.sendall(contents.data[start : start + PIECE_BYTES])
        connection.send(time.process_time() - cpu)
    source.close()


def receive_blocks(target: TcpTarget, num_blocks: int) -> None:
    while num_blocks:
        select.select([target.fd], [], [])
        num_blocks -= len(target.poll(num_blocks))


def receive_stream(stream: ssl.SSLSocket, pool: Pool) -> None:
    left = pool.reshape(-1).data
    while len(left):
        left = left[stream.recv_into(left[:PIECE_BYTES]) :]


def server_context() -> ssl.SSLContext:
    """With a fresh certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = f"{folder}/key.pem", f"{folder}/certificate.pem"
        subprocess.run(
            [*CERTIFICATE.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True
        )
        context.load_cert_chain(certificate, key)
    return context


if __name__ == "__main__":
    main()
