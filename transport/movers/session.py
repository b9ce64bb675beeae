"""How the two ends of a data connection know each other, and how what they say is sealed.

Both know the secret S of the data address, which came over the encrypted control channel. C and N are fresh random nonces.

    client -> server   "SSKV" | version | mode | 2 bytes 0 | C
    server -> client   N | HMAC-SHA256(S, "server" | mode | C | N)
    client -> server   HMAC-SHA256(S, "client" | mode | C | N)

Then parcels (parcel.py) flow from client to server. In the mode *sealed* they are cut into records, each AES-256-GCM under the key
HMAC-SHA256(S, "sealed" | mode | C | N), the nonce counting the records: one that is changed, left out, repeated or moved to another
place or connection does not open. In the mode *plain* only the two proofs and the secrets of the grants protect them.
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PLAIN, SEALED = 0, 1
NONCE_BYTES = PROOF_BYTES = 32
TAG_BYTES = 16
_HELLO = struct.Struct(f"<4sBB2x{NONCE_BYTES}s")
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
        known = magic == _MAGIC and version == _VERSION and mode in (PLAIN, SEALED) and data[6:8] == b"\0\0"
        return cls(mode, nonce) if known else None


@dataclass(frozen=True, slots=True)
class Transcript:
    """What both ends have said; ``secret`` is what makes it worth something."""

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
        return Seal(self._mac(b"sealed")) if self.hello.mode == SEALED else None

    def _mac(self, purpose: bytes) -> bytes:
        said = purpose + bytes([self.hello.mode]) + self.hello.nonce + self.server_nonce
        return hmac.digest(self.secret, said, "sha256")


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


class Seal:
    """Seals or opens the records of one connection, in order. One object for each end; not both ways with the same one."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._num_records = 0

    def close_into(self, record: memoryview | bytes, sealed: memoryview) -> None:
        """``sealed`` is TAG_BYTES longer than ``record``."""
        self._cipher.encrypt_into(self._next_nonce(), record, None, sealed)

    def open_into(self, sealed: memoryview, record: memoryview) -> bool:
        """False where ``sealed`` is not what the other end sealed as its next record; ``record`` then holds nothing of use."""
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
