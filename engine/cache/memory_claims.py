"""Host memory that the workers of this host have claimed and not touched yet.

A KV cache in private memory takes room little by little, and a model that is being loaded has not taken its
room yet, so that free memory alone would be given out twice. Each worker therefore keeps a claim in
``/dev/shm/splitserve-memory-UID``: one small file, locked for as long as its process lives. A claim whose
lock is gone counts for nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

CLAIM_BYTES = 4096  # of a claim's file
LOCK_S = 10.0  # longest wait for another worker that counts; then without its turn


@dataclass(frozen=True, slots=True)
class Claim:
    """What a live worker has taken, or is going to take, in bytes. ``before``: its private memory before it
    loaded anything."""

    pid: int
    cluster: str  # workers of one cluster share its part of the memory
    before: int
    weights: int
    kv_cache: int = 0
    committed: int = 0
    """Bytes of these that are taken in full already and that private memory does not show (a shared pool)."""
    cores: tuple[int, ...] = ()  # on which it computes

    def pending(self, private: int) -> int:
        """Bytes that it has not touched yet; ``private``: of its memory now."""
        return max(0, self.weights + self.kv_cache - self.committed - max(0, private - self.before))


@dataclass(frozen=True, slots=True)
class Others:
    """What the other workers of this host will still take (``pending``), the KV caches of the same cluster
    among them, and the cores on which they compute."""

    pending: int
    siblings: tuple[int, ...]
    cores: frozenset[int] = frozenset()


class MemoryClaims:
    """This worker's claim, for as long as this object or its process lives, and those of others."""

    def __init__(self, cluster: str, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()
        self._cluster, self._pid = cluster, os.getpid()
        self._claim = Claim(self._pid, cluster, private_bytes(self._pid), 0)
        self._file = self._open()

    @contextmanager
    def turn(self) -> Iterator[Others]:
        """While one worker counts and claims, no other does."""
        if self._file is None:
            yield Others(0, ())
            return
        with (self._folder / "lock").open("a") as lock:
            deadline = time.monotonic() + LOCK_S
            while not _locked(lock.fileno()) and time.monotonic() < deadline:
                time.sleep(0.01)
            yield self._others()

    def claim(self, weights: int = 0, kv_cache: int = 0, committed: int = 0) -> None:
        """What this worker takes in all, from now on."""
        self._record(replace(self._claim, weights=weights, kv_cache=kv_cache, committed=committed))

    def claim_cores(self, cores: tuple[int, ...]) -> None:
        """The cores on which this worker computes from now on."""
        self._record(replace(self._claim, cores=cores))

    def _record(self, claim: Claim) -> None:
        self._claim = claim
        if self._file is not None:
            # a full file system: a claim is a courtesy to workers that start beside this one
            with suppress(OSError):
                os.pwrite(self._file, json.dumps(asdict(self._claim)).encode().ljust(CLAIM_BYTES), 0)

    def committed(self, num_bytes: int) -> None:
        """Record that this part of the claim is allocated by now, in memory that is not private."""
        self.claim(self._claim.weights, self._claim.kv_cache, num_bytes)

    def _open(self) -> int | None:
        """The claim's own locked file; None where there can be none."""
        if not _is_own_folder(self._folder):
            return None
        try:
            file, path = tempfile.mkstemp(prefix=f"{self._pid}-", dir=self._folder)
        except OSError:
            return None
        _locked(file)
        weakref.finalize(self, _forget, file, Path(path), self._pid)
        return file

    def _others(self) -> Others:
        claims = [claim for claim in _live_claims(self._folder) if claim.pid != self._pid]
        siblings = tuple(claim.kv_cache for claim in claims if claim.cluster == self._cluster)
        cores = frozenset(core for claim in claims for core in claim.cores)
        return Others(sum(claim.pending(private_bytes(claim.pid)) for claim in claims), siblings, cores)


def _forget(file: int, path: Path, pid: int) -> None:
    os.close(file)
    if os.getpid() == pid:  # not in a fork
        path.unlink(missing_ok=True)


def default_folder() -> Path:
    """One for each user: /dev/shm, which a container has to itself as it has its memory limit, or the
    temporary folder."""
    shared = Path("/dev/shm")
    parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"splitserve-memory-{os.getuid()}"


def private_bytes(pid: int) -> int:
    """Anonymous memory of a process; 0 where it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def _live_claims(folder: Path) -> Iterator[Claim]:
    """Removes those of workers that have ended."""
    for path in folder.glob("[0-9]*-*"):
        try:
            with path.open("rb") as file:
                claim = Claim(**json.loads(file.read(CLAIM_BYTES)))
                if _locked(file.fileno()):
                    path.unlink(missing_ok=True)
                else:
                    yield claim
        except (OSError, ValueError, TypeError):  # just gone, or not yet written
            continue


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_own_folder(folder: Path) -> bool:
    """Made where it is absent. Another user's folder of this name, or a link, is not used."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    return folder.is_dir() and not folder.is_symlink() and status.st_uid == os.getuid()
