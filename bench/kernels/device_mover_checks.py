"""How blocks leave and reach a GPU's pool: through the mirror in page-locked memory, and by cuda_ipc between
two processes on one GPU."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

import torch

from ...engine.cache.device_blocks import DeviceBlocks
from ...engine.cache.host_mirror import HostMirror

SHAPE = (64, 8, 65536)  # blocks, layers, bytes: 32 MiB
DEADLINE_S = 30.0
WRITER = ("p0", 1)


def host_mirror(device: str) -> float:
    """0 if blocks and layers come to the host and go back to other blocks whole, and no others change."""
    shape = SHAPE if device != "cpu" else (8, 4, 64)
    pool = _filled(shape).to(device)
    mirror, before = HostMirror(pool), pool.cpu()
    mirror.fetch([5, 2])
    mirror.fetch([3], 1, 2)
    host = torch.from_numpy(mirror.pool)
    fetched = torch.equal(host[[5, 2]], before[[5, 2]]) and torch.equal(host[3, 1:3], before[3, 1:3])
    host[7] = before[1]
    mirror.store([7])
    before[7] = before[1]
    return float(not (fetched and torch.equal(pool.cpu(), before)))


def cuda_ipc(device: str) -> float:
    """0 if the blocks and layers put reach their places in another process's pool, by the checksums that both
    compute on the GPU."""
    from ...transport.movers.cuda_ipc import (
        CudaIpcSource,  # needs msgspec, which only this check and the worker's figures do
        LoadedCudart,
    )

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_owner, args=(theirs, device))
    process.start()
    theirs.close()
    try:
        pool = _filled(SHAPE).to(device)
        blocks = DeviceBlocks(pool)
        source = CudaIpcSource(
            ours.recv(), len(pool), blocks.pointer, SHAPE, LoadedCudart(pool.device.index or 0)
        )
        source.put(1, b"", [(i, i, i + 1) for i in range(len(pool) - 2)])
        source.put(1, b"", [(62, 7, 63)], 0, 3)
        source.put(1, b"", [(62, 7, 63)], 3)
        deadline = time.monotonic() + DEADLINE_S
        while source.pending():
            source.poll()
            if time.monotonic() > deadline:
                return 1.0
        source.close()
        ours.send("done")
        found = ours.recv()
        return float(found != [*blocks.checksums([*range(len(pool) - 2), 7])])
    finally:
        ours.close()
        process.join(DEADLINE_S)
        if process.is_alive():
            process.kill()


def _owner(connection: Connection, device: str) -> None:
    """The decode worker's part: a pool that the other process writes."""
    from ...transport.movers.cuda_ipc import CudaIpcTarget, LoadedCudart

    pool = torch.zeros(SHAPE, dtype=torch.uint8, device=device)
    connection.send(CudaIpcTarget(pool.data_ptr(), LoadedCudart(pool.device.index or 0)).address(WRITER))
    connection.recv()
    connection.send(DeviceBlocks(pool).checksums(list(range(1, len(pool)))))


def _filled(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
