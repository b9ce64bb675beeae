"""The cluster key: one CURVE key pair that every process of a cluster has, and nobody else.

A process shows that it belongs by knowing the secret half; servers accept no client with any other key (``channels``).
The file is three lines of text, readable by its owner only:

    splitserve-cluster-key 1
    public <40 characters, z85>
    secret <40 characters, z85>
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from .errors import KeyFileError

_HEADER = "splitserve-cluster-key 1"
_MAX_FILE_BYTES = 4096


@dataclass(frozen=True)
class ClusterKey:
    """A CURVE key pair, both halves in z85 (40 bytes). The secret stays out of logs."""

    public: bytes
    secret: bytes = field(repr=False)


def new_key() -> ClusterKey:
    """A fresh key that exists in memory only."""
    public, secret = zmq.curve_keypair()
    return ClusterKey(public, secret)


def generate_key(path: str | os.PathLike[str]) -> ClusterKey:
    """Makes a new key and writes it to ``path`` (mode 0600), which must not exist yet. Raises KeyFileError."""
    path = Path(path)
    key = new_key()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise KeyFileError(f"{path} exists already; delete it first if the cluster should get a new key") from None
    except OSError as error:
        raise KeyFileError(f"cannot write the cluster key to {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{_HEADER}\npublic {key.public.decode()}\nsecret {key.secret.decode()}\n")
    return key


def load_key(path: str | os.PathLike[str]) -> ClusterKey:
    """The key in ``path``. Raises KeyFileError where the file is missing, open to other users, or not a cluster key."""
    try:
        with open(path, "rb") as file:
            _refuse_open_file(os.fstat(file.fileno()), path)
            text = file.read(_MAX_FILE_BYTES)
    except FileNotFoundError:
        raise KeyFileError(f"no cluster key at {path}; make one with: splitserve keygen {path}") from None
    except OSError as error:
        raise KeyFileError(f"cannot read the cluster key {path}: {error.strerror}") from None
    return key_from_text(text, path)


def _refuse_open_file(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        raise KeyFileError(f"the cluster key {path} is open to other users (mode {mode:04o}); run: chmod 600 {path}")


def key_from_text(text: bytes, path: str | os.PathLike[str]) -> ClusterKey:
    """The key in a file's content; ``path`` is for the errors. Raises KeyFileError."""
    lines = text.decode("ascii", errors="replace").split("\n")
    fields = dict(line.split(" ", 1) for line in lines[1:] if " " in line)
    if lines[0] != _HEADER:
        raise KeyFileError(f"{path} is not a cluster key of this version; its first line must be '{_HEADER}'")
    key = ClusterKey(fields.get("public", "").encode(), fields.get("secret", "").encode())
    try:
        matches = zmq.curve_public(key.secret) == key.public
    except (ValueError, zmq.ZMQError):
        matches = False
    if not matches:
        raise KeyFileError(f"the cluster key {path} is damaged: its public and secret halves do not belong together")
    return key
