"""The ``shm`` mover: the decode worker's pool lies in memory that prefill workers of the same host map; a put
is a memcpy.

The memory is a memfd: it has no name in any file system, so it is not limited by the size of /dev/shm and is
gone with the last process that maps it, however that process ended. Peers of the same user open it through
/proc. Its size is sealed, so that nobody can shrink it under a writer (which would then die of SIGBUS).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np

from ..errors import MoverError
from .interface import Arrival, Items, OneSidedTarget, PeerProcess, Pool, layer_slice

_LARGEST_PID = (1 << 31) - 1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedPool:
    """Memory for a KV pool that peers on this host can map. ``buffer`` is writable, zeroed and really
    there."""

    def __init__(self, descriptor: int, mapping: mmap.mmap):
        self._descriptor = descriptor
        self._mapping = mapping
        self.buffer = memoryview(mapping)
        self.name = f"memfd:{os.getpid()}:{descriptor}:{os.fstat(descriptor).st_ino}"

    @classmethod
    def create(cls, num_bytes: int) -> SharedPool:
        """Raises MoverError where there is not that much memory."""
        descriptor = os.memfd_create("splitserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            mapping = mmap.mmap(descriptor, num_bytes)
            mapping.madvise(mmap.MADV_HUGEPAGE)  # where the kernel gives them for shared memory
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            os.close(descriptor)
            reason = os.strerror(error.errno or errno.ENOMEM)
            raise MoverError(
                f"cannot share {num_bytes / 2**30:.2f} GiB of memory for the KV pool ({reason}); "
                "choose fewer KV blocks, or the tcp mover, which needs no shared memory"
            ) from None
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return cls(descriptor, mapping)

    def close(self) -> None:
        """Let no new peer map it. Present mappings, such as ``buffer``, stay."""
        os.close(self._descriptor)


class ShmTarget(OneSidedTarget):
    """The receiving side, for all writers."""

    def __init__(self, pool: SharedPool):
        self.shm_name = pool.name


class ShmSource:
    """The sending side: the peer's pool, mapped."""

    def __init__(self, shm_name: str, num_blocks: int, pool: Pool):
        """Raises MoverError where the peer's pool cannot be mapped or does not hold ``num_blocks`` blocks
        like ours."""
        self._pool = pool
        num_bytes = num_blocks * pool[0].nbytes
        self._process, self._mapping = _map(shm_name, num_bytes)
        self._target: Pool = np.frombuffer(self._mapping, dtype=np.uint8)[:num_bytes].reshape(
            num_blocks, *pool.shape[1:]
        )
        self._done: list[Arrival] = []

    def put(
        self, lease: int, secret: bytes, items: Items, first_layer: int = 0, num_layers: int | None = None
    ) -> None:
        """One copy for each run of blocks that lie side by side in both pools; a memcpy where it is of all
        layers."""
        layers = layer_slice(self._pool.shape, first_layer, num_layers)
        self._process.check()
        start = 0
        for end in range(1, len(items) + 1):
            if end == len(items) or items[end][1:] != (items[end - 1][1] + 1, items[end - 1][2] + 1):
                self._copy(items[start][1], items[start][2], end - start, layers)
                start = end
        self._done += [(lease, position) for position, _, _ in items]

    def _copy(self, source: int, target: int, count: int, layers: slice) -> None:
        if not (0 <= source <= len(self._pool) - count and 0 <= target <= len(self._target) - count):
            raise MoverError(
                f"put of block {source} into block {target}: pools of {len(self._pool)} and "
                f"{len(self._target)} blocks"
            )
        np.copyto(self._target[target : target + count, layers], self._pool[source : source + count, layers])

    def poll(self) -> list[Arrival]:
        self._process.check()  # also when idle: the memory of a dead process stays as long as it is mapped
        done, self._done = self._done, []
        return done

    def pending(self) -> int:
        return 0

    def writing(self, lease: int) -> bool:
        return False

    def cancel(self, lease: int) -> None:
        """Nothing is ever under way."""

    def close(self) -> tuple[()]:
        """Unmaps the peer's pool."""
        del self._target
        self._mapping.close()
        self._process.close()
        return ()


def _map(shm_name: str, num_bytes: int) -> tuple[PeerProcess, mmap.mmap]:
    """(the owning process, its memory). The inode shows that it is the memory meant, not a
    later one."""
    try:
        kind, *numbers = shm_name.split(":")
        pid, descriptor, inode = (int(number) for number in numbers)
        if kind != "memfd" or pid > _LARGEST_PID:
            raise ValueError
    except ValueError:
        raise MoverError(f"{shm_name!r} names no shared memory") from None
    process = PeerProcess(pid)  # before the check below: so it stays the process checked
    try:
        return process, _map_file(f"/proc/{pid}/fd/{descriptor}", inode, num_bytes)
    except (OSError, MoverError) as error:
        try:
            process.check()  # its files went a moment before it
        finally:
            process.close()
        raise MoverError(f"cannot map the decode worker's KV pool ({shm_name}): {error}") from None


def _map_file(path: str, inode: int, num_bytes: int) -> mmap.mmap:
    if os.stat(path).st_ino != inode:
        raise MoverError("that memory is gone")
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(file)
        if status.st_ino != inode or fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise MoverError("that is not a KV pool")
        if status.st_size < num_bytes:
            raise MoverError(f"it holds {status.st_size} bytes, {num_bytes} are needed")
        return mmap.mmap(file, status.st_size)
    finally:
        os.close(file)
