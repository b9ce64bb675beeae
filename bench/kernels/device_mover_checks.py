"""How blocks leave and reach a GPU's pool: through page-locked records, and by cuda_ipc between two processes
on one GPU."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from ...engine.cache.device_blocks import DeviceBlocks
from ...engine.cache.sharded_blocks import ShardedBlocks

SHAPE = (64, 8, 65536)  # blocks, layers, bytes: 32 MiB
HEADS = 4
DEADLINE_S = 30.0
WRITER = ("p0", 1)


def staging(device: str) -> float:
    """0 if pieces of the pool come to the host and go back to other places whole, and no others change."""
    from ...transport.movers.block_memory import Staging  # needs msgspec

    pool = _filled(SHAPE).to(device).view(-1)
    expected, through = pool.cpu(), Staging(pool.device, 256 << 10)
    whole = True
    for start, end in ((5, 70_000), (131_072, 196_608), (1, 2)):
        read = torch.frombuffer(through.read(pool, (start, end)), dtype=torch.uint8)
        whole = whole and torch.equal(read, expected[start:end])
        through.write(pool, (300_000 + start, 300_000 + end))
        expected[300_000 + start : 300_000 + end] = expected[start:end].clone()
    return float(not (whole and torch.equal(pool.cpu(), expected)))


def cuda_ipc(device: str, of: int = 1, to: int = 1) -> float:
    """0 if the blocks and layers put reach their places in another process's pool, by the checksums that both
    compute on the GPU. The pools are cut as for ``of`` and ``to`` GPUs, which all are this one."""
    from ...transport.movers.cuda_ipc import CudaIpcSource  # needs msgspec, which only checks of movers do
    from ...transport.movers.cudart import LoadedCudart

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_owner, args=(theirs, device, to))
    process.start()
    theirs.close()
    try:
        blocks = _blocks(_filled(SHAPE).to(device), of)
        source = CudaIpcSource(received(ours), SHAPE[0], blocks, LoadedCudart)
        source.put(1, b"", [(i, i, i + 1) for i in range(SHAPE[0] - 2)])
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
        return float(found != [*blocks.checksums([*range(SHAPE[0] - 2), 7])])
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


def _owner(connection: Connection, device: str, num_gpus: int) -> None:
    """The decode worker's part: a pool that the other process writes."""
    from ...transport.movers.cuda_ipc import CudaIpcTarget
    from ...transport.movers.cudart import LoadedCudart

    blocks = _blocks(torch.zeros(SHAPE, dtype=torch.uint8, device=device), num_gpus)
    connection.send(CudaIpcTarget(blocks, LoadedCudart).address(WRITER))
    connection.recv()
    connection.send(blocks.checksums(list(range(1, SHAPE[0]))))


def _blocks(pool: torch.Tensor, num_gpus: int) -> DeviceBlocks | ShardedBlocks:
    """The pool on one GPU, or with its KV heads cut as for several."""
    if num_gpus == 1:
        return DeviceBlocks(pool)
    count = HEADS // num_gpus
    parts = pool.view(*SHAPE[:2], 2, HEADS, 16, -1).chunk(num_gpus, 3)
    heads = [range(first, first + count) for first in range(0, HEADS, count)]
    return ShardedBlocks([part.contiguous() for part in parts], heads, HEADS)


def _filled(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
