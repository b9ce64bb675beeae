"""API keys, and the digests of them that are stored.

    sk-split-<43 characters>: 32 random bytes in URL-safe base64

Only the SHA-256 of a key is stored. A slow, salted hash protects passwords because people choose guessable
ones; a key of 256 random bits has no dictionary, so that one SHA-256 is as good, and costs a request half a
microsecond instead of a tenth of a second.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

PREFIX = "sk-split-"
NUM_RANDOM_BYTES = 32


def new_key() -> str:
    """Return a new random key."""
    return PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(NUM_RANDOM_BYTES)).rstrip(b"=").decode()


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 that is stored and looked up: 32 bytes."""
    return hashlib.sha256(key).digest()


def hint_of(key: str) -> str:
    """Return a short form by which a key can be recognised."""
    return f"{PREFIX}...{key[-4:]}"


def same(a: bytes, b: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(a, b)


def bearer(authorization: bytes) -> bytes:
    """Return the key in an ``Authorization`` header; empty if there is none."""
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
