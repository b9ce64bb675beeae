"""The cluster key: a CURVE key pair that every process of a cluster has, and nobody else.

A process shows that it belongs by knowing the secret half; servers accept no client with any other key
(``Authenticator``). The file is text, readable by its owner only:

    splitserve-cluster-key 1
    public <40 characters, z85>
    secret <40 characters, z85>

While the key is being changed the file holds a second pair. Servers let clients with either in; clients use
the first. So a cluster changes its key without a break, in three steps (``rotate``), each of which has
reached every process before the next one is taken:

    add      old         -> old, new     servers let both in
    switch   old, new    -> new, old     clients use the new one
    finish   new, old    -> new          the old one opens nothing any more
"""

from __future__ import annotations

import hmac
import os
import stat
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils import z85

from ..errors import KeyFileError
from ..process.private_files import is_open_to_others

_HEADER = "splitserve-cluster-key 1"
_MAX_FILE_BYTES = 4096


@dataclass(frozen=True)
class ClusterKey:
    """A CURVE key pair, both halves in z85 (40 bytes). The secret stays out of logs."""

    public: bytes
    secret: bytes = field(repr=False)
    second: ClusterKey | None = None  # while the key is being changed

    @property
    def pairs(self) -> tuple[ClusterKey, ...]:
        """This one, and the second if there is one; neither holds the other."""
        return (self,) if self.second is None else (replace(self, second=None), self.second)


def new_key() -> ClusterKey:
    """A fresh key that exists in memory only."""
    public, secret = zmq.curve_keypair()
    return ClusterKey(public, secret)


def generate_key(path: str | os.PathLike[str]) -> ClusterKey:
    """Makes a new key and writes it to ``path`` (mode 0600), which must not exist yet. Raises
    KeyFileError."""
    path = Path(path)
    key = new_key()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise KeyFileError(f"cannot write the cluster key to {path}: {error.strerror}") from None
    _write(path, key)
    return key


def rotate(path: str | os.PathLike[str], step: Literal["add", "switch", "finish"]) -> ClusterKey:
    """The next step of changing the key in ``path``, in place. Raises KeyFileError, also where it is not the
    time for that step."""
    path, key = Path(path), load_key(path)
    old = ClusterKey(key.public, key.secret)
    if step == "add" and key.second is None:
        changed = replace(old, second=new_key())
    elif step == "switch" and key.second is not None:
        changed = replace(key.second, second=old)
    elif step == "finish" and key.second is not None:
        changed = old
    else:
        there = (
            "one key only: begin with add"
            if key.second is None
            else "two keys already: go on with switch, then finish"
        )
        raise KeyFileError(f"cannot {step}: {path} holds {there}")
    new_path = path.with_name(path.name + ".new")
    new_path.unlink(missing_ok=True)
    _write(new_path, changed)
    os.replace(new_path, path)
    return changed


def _write(path: Path, key: ClusterKey) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise KeyFileError(
            f"{path} exists already; delete it first if the cluster should get a new key"
        ) from None
    except OSError as error:
        raise KeyFileError(f"cannot write the cluster key to {path}: {error.strerror}") from None
    lines = (f"public {pair.public.decode()}\nsecret {pair.secret.decode()}\n" for pair in key.pairs)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{_HEADER}\n" + "".join(lines))
    except OSError as error:  # a disk that is full: half a key would be taken for a broken one
        path.unlink(missing_ok=True)
        raise KeyFileError(f"cannot write the cluster key to {path}: {error.strerror}") from None


def load_key(path: str | os.PathLike[str]) -> ClusterKey:
    """The key in ``path``. Raises KeyFileError where the file is missing, open to other users, or not a
    cluster key."""
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
    if is_open_to_others(status):
        mode = stat.S_IMODE(status.st_mode)
        raise KeyFileError(
            f"the cluster key {path} is open to other users (mode {mode:04o}); run: chmod 600 {path}"
        )


def key_from_text(text: bytes, path: str | os.PathLike[str]) -> ClusterKey:
    """The key in a file's content; ``path`` is for the errors. Raises KeyFileError."""
    first, *lines = text.decode("ascii", errors="replace").rstrip("\n").split("\n")
    if first != _HEADER:
        raise KeyFileError(f"{path} is not a cluster key of this version; its first line must be '{_HEADER}'")
    pairs = [_pair(lines[at : at + 2]) for at in range(0, len(lines), 2)]
    if None in pairs or not 1 <= len(pairs) <= 2:
        raise KeyFileError(
            f"the cluster key {path} is damaged: its public and secret halves do not belong together"
        )
    key, *second = (pair for pair in pairs if pair is not None)
    return replace(key, second=second[0] if second else None)


def _pair(lines: list[str]) -> ClusterKey | None:
    """The key pair in two lines; None where they hold none."""
    if len(lines) != 2 or not (lines[0].startswith("public ") and lines[1].startswith("secret ")):
        return None
    key = ClusterKey(lines[0][7:].encode(), lines[1][7:].encode())
    try:
        return key if zmq.curve_public(key.secret) == key.public else None
    except (ValueError, zmq.ZMQError):
        return None


class KeyFile:
    """A key file that is looked at now and then, by a process that goes on while the key is being changed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises KeyFileError."""
        self._path = path
        self._seen = stamp_of(path)
        self.key = load_key(path)

    def changed(self) -> bool:
        """Whether ``key`` is another one since the last call. Raises KeyFileError, once, where the file is no
        key any more; the key then stays."""
        state = stamp_of(self._path)
        if state == self._seen:
            return False
        self._seen = state
        before, self.key = self.key, load_key(self._path)
        return self.key != before


def stamp_of(path: str | os.PathLike[str]) -> tuple[int, int, int] | None:
    """What changes when a file does; None: it cannot be read. Also the size: a clock that ticks every few
    milliseconds gives two writes one time."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


_ENDPOINT = "inproc://zeromq.zap.01"
_NUM_REQUEST_FRAMES = 6  # version, request id, domain, address, identity, mechanism; then the credentials


class Authenticator:
    """A ZAP handler (rfc.zeromq.org/spec/27) in a daemon thread, one per ZeroMQ context, until that ends.

    A listening endpoint's *ZAP domain* names the one credential it accepts: the cluster's public key (z85).
    The domain never travels, so the handler needs no list and serves any number of endpoints.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]):
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        # before any server socket: without a handler every peer would be accepted
        self._socket.bind(_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="zmq-authenticator", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread, which ends with its context."""
        self._thread.join()

    def _serve(self) -> None:
        with self._socket:
            while True:
                try:
                    request = self._socket.recv_multipart()
                    self._socket.send_multipart(_answer(request))
                except zmq.ContextTerminated:
                    return


def _answer(request: list[bytes]) -> list[bytes]:
    version, request_id, domain = request[:3]
    if _is_member(domain, request[_NUM_REQUEST_FRAMES - 1], request[_NUM_REQUEST_FRAMES:]):
        return [version, request_id, b"200", b"OK", b"member", b""]
    return [version, request_id, b"400", b"not a member of this cluster", b"", b""]


def _is_member(domain: bytes, mechanism: bytes, credentials: list[bytes]) -> bool:
    if mechanism == b"CURVE" and len(credentials) == 1:  # the client's public key, proved by the handshake
        return hmac.compare_digest(z85.encode(credentials[0]), domain)
    return False
