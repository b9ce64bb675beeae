"""How blocks leave and reach a GPU's pool: through page-locked records, and by cuda_ipc between two processes
on one GPU."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from ...engine.cache.device_blocks import DeviceBlocks

SHAPE = (64, 8, 65536)  # blocks, layers, bytes: 32 MiB
DEADLINE_S = 30.0
WRITER = ("p0", 1)


def staging(device: str) -> float:
    """0 if pieces of the pool come to the host and go back to other places whole, and no others change."""
    from ...transport.movers.block_memory import Staging  # needs msgspec

    pool = _filled(SHAPE).to(device)
    before, through = pool.cpu().clone().view(-1), Staging(DeviceBlocks(pool), 256 << 10)
    record = [(5, 70_000), (131_072, 196_608), (1, 2)]
    expected = torch.cat([before[start:end] for start, end in record])
    (read,) = through.read(record)
    whole = torch.equal(torch.frombuffer(read, dtype=torch.uint8), expected)
    places = [(300_000 + start, 300_000 + end) for start, end in record]
    through.write(places)
    at = 0
    for start, end in places:
        before[start:end] = expected[at : at + end - start]
        at += end - start
    return float(not (whole and torch.equal(pool.cpu().view(-1), before)))


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
            received(ours), len(pool), blocks.pointer, SHAPE, LoadedCudart(pool.device.index or 0)
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
        found = received(ours)
        return float(found != [*blocks.checksums([*range(len(pool) - 2), 7])])
    finally:
        ours.close()
        process.join(DEADLINE_S)
        if process.is_alive():
            process.kill()


def received(connection: Connection) -> Any:
    """Raises TimeoutError where the other process, which may hang in CUDA, is silent for DEADLINE_S."""
    if not connection.poll(DEADLINE_S):
        raise TimeoutError("the other process with a pool on this GPU does not answer")
    return connection.recv()


def _owner(connection: Connection, device: str) -> None:
    """The decode worker's part: a pool that the other process writes."""
    from ...transport.movers.cuda_ipc import CudaIpcTarget, LoadedCudart

    pool = torch.zeros(SHAPE, dtype=torch.uint8, device=device)
    connection.send(CudaIpcTarget(pool.data_ptr(), LoadedCudart(pool.device.index or 0)).address(WRITER))
    connection.recv()
    connection.send(DeviceBlocks(pool).checksums(list(range(1, len(pool)))))


def _filled(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
