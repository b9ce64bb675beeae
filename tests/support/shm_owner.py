"""A process that owns a pool in shared memory."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import numpy as np
from support.kv_pools import BLOCK_BYTES, NUM_BLOCKS, POOL_SHAPE

from splitserve.transport.messages.messages import Met
from splitserve.transport.movers.interface import Pool, PutSource
from splitserve.transport.movers.opening import open_source
from splitserve.transport.movers.shm import SharedPool, ShmTarget


def shm_pair(stack: ExitStack, source_pool: Pool) -> tuple[ShmTarget, PutSource, Pool]:
    shared = SharedPool.create(NUM_BLOCKS * BLOCK_BYTES)
    stack.callback(shared.close)
    pool: Pool = np.frombuffer(shared.buffer, dtype=np.uint8).reshape(POOL_SHAPE)
    target = ShmTarget(shared)
    source = open_source(
        Met(worker_id="d0", incarnation=1, mover="shm", num_blocks=NUM_BLOCKS, shm_name=target.shm_name),
        source_pool,
    )
    stack.callback(source.close)
    return target, source, pool


# --- shm -----------------------------------------------------------------------------------------

OWNER = """
import sys
from splitserve.transport.movers.shm import SharedPool
pool = SharedPool.create(int(sys.argv[1]))
print(pool.name, flush=True)
sys.stdin.read()
"""


def start_owner(stack: ExitStack, num_bytes: int) -> tuple[subprocess.Popen[str], str]:
    """A process that owns a shared pool, and the pool's name."""
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", OWNER, str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()
