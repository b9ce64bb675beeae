"""The bytes of a data connection. Both ends know the secret S of its address, which came over the encrypted
control channel. C and N are fresh random nonces.

    client -> server   "SSKV" | version | mode | 2 bytes 0 | C
    server -> client   N | HMAC-SHA256(S, "server" | mode | C | N)
    client -> server   HMAC-SHA256(S, "client" | mode | C | N)

Then parcels flow from client to server: some layers of one or several blocks of a lease each, little-endian.

    size of the header u32 | header | body
    header: "SSKV" | version u8 | 3 bytes 0 | lease u64 | secret 16 B | offset u64 | length u64
            | positions u32 ...

The body holds, for each position in turn, bytes [offset, offset + length) of its block. In the *sealed* modes
the header is one record and the body is cut into records of RECORD_BYTES, the last one shorter; each is
followed by its tag, and the size counts the tag. A record is sealed under the key HMAC-SHA256(S, "sealed" |
mode | C | N) with its number as nonce: one that is changed, left out, repeated or moved to another connection
does not open. In the mode *plain* only the two proofs and the secrets of the grants protect the parcels.
There is no forward secrecy: S lives as long as the decode worker's process.

There are two ciphers, AES-256-GCM and AES-128-OCB3 (RFC 7253); the client takes the one that is quicker on
its processor. GCM's authentication costs as much again as AES itself without 512-bit carry-less products,
OCB's next to nothing.

Why not TLS 1.3: the standard library's carries 0.63 of this per processor second (0.42 of it by wall time),
because TLS records hold at most 16 KiB and each takes a call from Python (``bench/handoff/tls.py``,
``bench/results/tls.json``; the bound for dropping this protocol was 0.8).

The address of a data connection is one string, which travels over the control channel only:

    tcp://host:port#<secret, 64 hex digits>          blocks travel sealed
    tcp://host:port#<secret, 64 hex digits>#plain    the decode worker accepts plain ones too (--plaintext-kv)
"""

from __future__ import annotations

import functools
import hmac
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESOCB3

from ...errors import MoverError
from ...messages import messages
from ..interface import Span
from ..lease_book import ParcelHeader

PLAIN, GCM, OCB = 0, 1, 2
NONCE_BYTES = PROOF_BYTES = 32
TAG_BYTES = 16
RECORD_BYTES = 256 << 10
SECRET_BYTES = 32  # of an address; a grant's has messages.SECRET_BYTES
SIZE = struct.Struct("<I")
_HELLO = struct.Struct(f"<4sBB2x{NONCE_BYTES}s")
_HEADER = struct.Struct(f"<4sB3xQ{messages.SECRET_BYTES}sQQ")
_MAGIC, _VERSION = b"SSKV", 2
HELLO_BYTES, ANSWER_BYTES = _HELLO.size, NONCE_BYTES + PROOF_BYTES


@dataclass(frozen=True, slots=True)
class Hello:
    mode: int
    nonce: bytes

    def pack(self) -> bytes:
        return _HELLO.pack(_MAGIC, _VERSION, self.mode, self.nonce)

    @classmethod
    def unpack(cls, data: bytes) -> Hello | None:
        """None where ``data`` (HELLO_BYTES) is no hello of this version."""
        magic, version, mode, nonce = _HELLO.unpack(data)
        known = magic == _MAGIC and version == _VERSION and mode in (PLAIN, GCM, OCB) and data[6:8] == b"\0\0"
        return cls(mode, nonce) if known else None


@dataclass(frozen=True, slots=True)
class Transcript:
    """The handshake of both ends, authenticated by ``secret``."""

    secret: bytes
    hello: Hello
    server_nonce: bytes

    @property
    def server_proof(self) -> bytes:
        return self._mac(b"server")

    @property
    def client_proof(self) -> bytes:
        return self._mac(b"client")

    def seal(self) -> Seal | None:
        """None in the mode plain."""
        return Seal(self._mac(b"sealed"), self.hello.mode) if self.hello.mode != PLAIN else None

    def _mac(self, purpose: bytes) -> bytes:
        text = purpose + bytes([self.hello.mode]) + self.hello.nonce + self.server_nonce
        return hmac.digest(self.secret, text, "sha256")


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


class Seal:
    """Seals or opens the records of one connection, in order. One object for each end; not both ways with the
    same one."""

    def __init__(self, key: bytes, mode: int) -> None:
        """``mode``: GCM or OCB; ``key``: 32 bytes, of which OCB takes the first half."""
        self._cipher = AESGCM(key) if mode == GCM else AESOCB3(key[:16])
        self._num_records = 0

    def close_into(self, record: memoryview | bytes, sealed: memoryview) -> None:
        """``sealed`` is TAG_BYTES longer than ``record``."""
        self._cipher.encrypt_into(self._next_nonce(), record, None, sealed)

    def open_into(self, sealed: memoryview, record: memoryview) -> bool:
        """Return False if ``sealed`` is not the other end's next record; ``record`` then has no valid
        content."""
        try:
            self._cipher.decrypt_into(self._next_nonce(), sealed, None, record)
        except InvalidTag:
            return False
        return True

    def skip(self) -> None:
        """The next record will not be opened."""
        self._num_records += 1

    def _next_nonce(self) -> bytes:
        self._num_records += 1
        return self._num_records.to_bytes(12, "little")


@functools.cache
def quickest_cipher() -> int:
    """GCM or OCB, as measured here once, in a few milliseconds."""
    record, sealed = bytes(RECORD_BYTES), memoryview(bytearray(RECORD_BYTES + TAG_BYTES))

    def seconds(mode: int) -> float:
        seal = Seal(bytes(32), mode)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            seal.close_into(record, sealed)
            times.append(time.perf_counter() - start)
        return min(times)

    return min((GCM, OCB), key=seconds)


def pack_header(header: ParcelHeader) -> bytes:
    fixed = _HEADER.pack(_MAGIC, _VERSION, header.lease, header.secret, header.offset, header.length)
    return fixed + struct.pack(f"<{len(header.positions)}I", *header.positions)


def header_bytes(num_positions: int) -> int:
    return _HEADER.size + 4 * num_positions


def unpack_header(data: bytes | memoryview, max_positions: int) -> ParcelHeader | None:
    """Return the header; None where ``data`` is not one of this version, or names no position or more than
    ``max_positions``."""
    size = len(data) - _HEADER.size
    if not 0 < size <= 4 * max_positions or size % 4:
        return None
    magic, version, lease, secret, offset, length = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or data[5:8] != b"\0\0\0":
        return None
    return ParcelHeader(
        lease, secret, offset, length, struct.unpack_from(f"<{size // 4}I", data, _HEADER.size)
    )


def spans(shape: Sequence[int], blocks: Sequence[int], offset: int, length: int) -> list[Span]:
    """Return the places of a parcel's body in a pool of this shape: runs of bytes, as long as possible."""
    block_bytes = shape[1] * shape[2]
    runs: list[Span] = []
    for block in blocks:
        start = block * block_bytes + offset
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + length)
        else:
            runs.append((start, start + length))
    return runs


def records(runs: Sequence[Span]) -> Iterator[list[Span]]:
    """Cut a body into records. Yield the runs of each."""
    record: list[Span] = []
    room = RECORD_BYTES
    for start, end in runs:
        while start < end:
            taken = min(room, end - start)
            record.append((start, start + taken))
            start, room = start + taken, room - taken
            if room == 0:
                yield record
                record, room = [], RECORD_BYTES
    if record:
        yield record


_TCP = re.compile(r"tcp://(?:\[(?P<v6>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:\[\]#]+)):(?P<port>\d{1,5}|\*)")


@dataclass(frozen=True, slots=True)
class DataAddress:
    host: str
    port: int
    secret: bytes = field(repr=False)
    takes_plain: bool

    def __str__(self) -> str:
        """Return its confidential text form."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}#{self.secret.hex()}" + ("#plain" if self.takes_plain else "")

    @classmethod
    def parse(cls, text: str) -> DataAddress:
        """Raises MoverError, without the secret in its words."""
        address, *rest = text.split("#")
        end = endpoint(address)
        try:
            secret = bytes.fromhex(rest[0])
        except (IndexError, ValueError):
            secret = b""
        if end is None or not end[1] or len(secret) != SECRET_BYTES or rest[1:] not in ([], ["plain"]):
            raise MoverError(
                f"cannot connect to {address} for KV blocks: expected tcp://host:port and a secret"
            )
        return cls(*end, secret, rest[1:] == ["plain"])


def endpoint(address: str) -> tuple[str, int] | None:
    """Return (host, port) of tcp://host:port, with 0 for port *; None for another address."""
    match = _TCP.fullmatch(address)
    if match is None or (match["port"] != "*" and int(match["port"]) > 65_535):
        return None
    return match["v6"] or match["host"], 0 if match["port"] == "*" else int(match["port"])
