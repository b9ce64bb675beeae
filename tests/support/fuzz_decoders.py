"""Every decoder of bytes from a peer or an outsider, under arbitrary bytes and damaged valid input.

    PYTHONPATH=tests python -m support.fuzz_decoders --inputs 5000000 --json bench/results/fuzz.json

An input must end in a value or in the decoder's own error, within MAX_SECONDS of the processor, and may not
make the process hold more than MAX_BYTES + MAX_BYTES_PER_BYTE times its size (Python's objects included;
looked at in one input of TRACED_EVERY). What breaks this is written out as hex. The same ``--seed`` gives the
same inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from support.fuzz_conversations import GRANT, LAYER_BYTES, SECRET, conversations, converse
from support.messages import EXAMPLES

from splitserve.transport.channels.coordinator_link import identity_of, opened_to, worker_of
from splitserve.transport.channels.keys import key_from_text, new_key
from splitserve.transport.errors import BadMessage, KeyFileError, MoverError
from splitserve.transport.messages.codec import WIRE, decode, encode
from splitserve.transport.movers.cuda_ipc import CudaIpcSource, CudaIpcTarget
from splitserve.transport.movers.cudart import HANDLE_BYTES
from splitserve.transport.movers.lease_book import ParcelHeader
from splitserve.transport.movers.shm import SharedPool, ShmSource
from splitserve.transport.movers.tcp.inbound import BadPeer
from splitserve.transport.movers.tcp.wire import DataAddress, pack_header, unpack_header

MAX_SECONDS = 2.0
HANG_SECONDS = 60.0
MAX_BYTES, MAX_BYTES_PER_BYTE = 1 << 20, 256
TRACED_EVERY = 16
BATCH = 1000
EVERY_TYPE = frozenset(kind for kind, _ in WIRE.values())
POOL = np.zeros((8, 4, LAYER_BYTES), dtype=np.uint8)
EDGES = [
    *(b"\x00", b"\xff", b"\xff" * 4, b"\xff" * 8, b"\x7f\xff\xff\xff"),
    *(
        kind + b"\xff\xff\xff\xff" for kind in (b"\xdd", b"\xdf", b"\xc6", b"\xc9", b"\xdb")
    ),  # msgpack: huge lists, maps, bytes, text
    *(b"\x91" * 600, b"\x81\x01" * 300),  # deep ones
    *(b"\xc7\x00\x01", b"\xcf" + b"\xff" * 8, b"\xcb\x7f\xf8" + bytes(6)),  # an extension, 2**64 - 1, NaN
]


@dataclass
class Decoder:
    """``decode`` returns whether the input was accepted; any exception but ``error`` is a find."""

    name: str
    decode: Callable[[bytes], bool]
    error: type[Exception] | None
    examples: list[bytes]
    weight: int = 1  # how often it has its turn, beside the others


@dataclass
class Record:
    """``peak_bytes``: the most that a traced input held, ``slowest_s``: processor time of one input, tracing
    included."""

    inputs: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    traced: int = 0
    peak_bytes: int = 0
    peak_of_allowed: float = 0.0
    slowest_s: float = 0.0
    seconds: float = 0.0


def decoders() -> list[Decoder]:
    header = pack_header(ParcelHeader(9, GRANT, 0, 4 * LAYER_BYTES, (0, 1)))
    address = DataAddress("127.0.0.1", 7711, SECRET, True)
    key = new_key()
    text = f"splitserve-cluster-key 1\npublic {key.public.decode()}\nsecret {key.secret.decode()}\n"
    shared = _shared_pool()
    cuda_addresses = [
        CudaIpcTarget(pool, lambda _: _AnyCuda()).address(("p0", 1))
        for pool in (_on_gpus(1), _on_gpus(2), _on_gpus(2, spread=True))
    ]
    messages = [encode(example) for example in EXAMPLES]
    return [
        Decoder("message", lambda data: bool(decode(data, EVERY_TYPE)), BadMessage, messages, 8),
        Decoder("parcel header", lambda data: unpack_header(data, 1024) is not None, None, [header], 2),
        Decoder("data connection", converse, BadPeer, conversations(header), 4),
        Decoder("data address", _as_text(DataAddress.parse), MoverError, [str(address).encode()]),
        Decoder(
            "socket identity",
            lambda data: worker_of(data) is not None and opened_to(data) > 0,
            None,
            [identity_of("p0", 17, 4)],
        ),
        Decoder("key file", lambda data: bool(key_from_text(data, "key")), KeyFileError, [text.encode()]),
        Decoder("shared memory's name", _as_text(_map_shared), MoverError, [shared.name.encode()]),
        Decoder("cuda_ipc address", _map_cuda, MoverError, cuda_addresses),
    ]


@cache
def _shared_pool() -> SharedPool:
    """It stays, so that its name is that of memory which can be mapped."""
    return SharedPool.create(POOL.nbytes)


def _map_shared(name: str) -> bool:
    ShmSource(name, len(POOL), POOL).close()
    return True


class _AnyCuda:
    """A stand-in for CUDA that maps whatever it is given: only it reads the handle."""

    def share(self, pointer: int) -> tuple[bytes, int]:
        return bytes(HANDLE_BYTES), 512

    def map(self, handle: bytes) -> int:
        return 1 << 40

    def unmap(self, pointer: int) -> None: ...

    def new_stream(self) -> object:
        return None

    def copy(self, target: object, source: object, width: int, num_rows: int, stream: object) -> None: ...

    def record(self, stream: object) -> object:
        return None

    def is_over(self, event: object) -> bool:
        return True

    def end_stream(self, stream: object) -> None: ...


def _on_gpus(count: int, spread: bool = False) -> Any:
    """A pool of ``count`` heads, one on each GPU; or of one, with some blocks on each."""
    heads = [range(1)] * count if spread else [range(i, i + 1) for i in range(count)]
    shards = [(0, torch.device("cpu"), own) for own in heads]
    of_block = {"rows": (1, 1), "spread": count} if spread else {"rows": (1, count), "spread": 1}
    return SimpleNamespace(shape=POOL.shape, shards=shards, **of_block)


def _map_cuda(address: bytes) -> bool:
    CudaIpcSource(address, len(POOL), _on_gpus(1), lambda _: _AnyCuda()).close()
    return True


def _as_text(parse: Callable[[str], object]) -> Callable[[bytes], bool]:
    return lambda data: bool(parse(data.decode(errors="replace")))


def mutated(rng: random.Random, examples: list[bytes]) -> bytes:
    """Arbitrary bytes, or a valid input damaged one to four times."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.choice((0, 1, 2, 4, 16, 64, 300)))
    data = bytearray(rng.choice(examples))
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((1, 1, 2, 4, 8, 40)))
        kind = rng.randrange(7)
        if kind == 0 and start < len(data):
            data[start] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[start:end] = rng.randbytes(end - start)
        elif kind == 2:
            data[start:end] = rng.choice(EDGES)
        elif kind == 3:
            del data[start:end]
        elif kind == 4:
            data[start:start] = data[start:end] * rng.choice((1, 2, 50))
        elif kind == 5:
            other = rng.choice(examples)
            data[start:] = other[rng.randrange(len(other) + 1) :]
        else:
            del data[start:]
    return bytes(data)


def fuzz(num_inputs: int, seed: int, before_batch: Callable[[], None] = lambda: None) -> Record:
    """Raises AssertionError with the input where a decoder misbehaves. ``before_batch`` is called every BATCH
    inputs."""
    rng, record, all_decoders = random.Random(seed), Record(), decoders()
    weights = [decoder.weight for decoder in all_decoders]
    began = time.perf_counter()
    for number in range(num_inputs):
        if number % BATCH == 0:
            before_batch()
        decoder = rng.choices(all_decoders, weights)[0]
        data = mutated(rng, decoder.examples)
        try:
            _one(decoder, data, record, traced=number % TRACED_EVERY == 0)
        except Exception as error:
            raise AssertionError(f"{decoder.name}, input {number} of seed {seed}: {data.hex()}") from error
    record.seconds = time.perf_counter() - began
    return record


def _one(decoder: Decoder, data: bytes, record: Record, traced: bool) -> None:
    if traced:
        tracemalloc.start(1)
    start = time.thread_time()
    accepted = False
    with contextlib.suppress(*([decoder.error] if decoder.error else [])):
        accepted = decoder.decode(data)
    seconds = time.thread_time() - start
    if traced:
        peak, allowed = tracemalloc.get_traced_memory()[1], MAX_BYTES + MAX_BYTES_PER_BYTE * len(data)
        tracemalloc.stop()
        record.traced += 1
        record.peak_bytes = max(record.peak_bytes, peak)
        record.peak_of_allowed = max(record.peak_of_allowed, peak / allowed)
        assert peak <= allowed, f"{peak} bytes held for an input of {len(data)}"
    assert seconds <= MAX_SECONDS, f"{seconds:.1f} s for an input of {len(data)} bytes"
    record.inputs[decoder.name] += 1
    record.accepted[decoder.name] += accepted
    record.slowest_s = max(record.slowest_s, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the record here")
    options = parser.parse_args()
    # Ends this process, so only here: a test has its own time limit, and shares its process with others.
    record = fuzz(
        options.inputs, options.seed, lambda: faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    )
    faulthandler.cancel_dump_traceback_later()
    print(
        f"{options.inputs} inputs in {record.seconds:.0f} s: no crash, no hang, at most "
        f"{record.peak_bytes} bytes held"
    )
    if options.json is not None:
        from splitserve.bench.environment import environment

        command = (
            f"PYTHONPATH=tests python -m support.fuzz_decoders --inputs {options.inputs} --seed "
            f"{options.seed}"
        )
        where = {**environment(), "command": command}
        options.json.write_text(json.dumps({"environment": where, **vars(record)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
