"""Which movers a worker offers, and from a decode worker's ``Met`` to the one that both agreed on."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import MoverError
from ..messages import Met
from . import nixl
from .block_memory import HostMemory
from .interface import Pool, PutSource
from .nccl_source import NcclSource
from .nixl import NixlSource
from .shm import ShmSource
from .tcp_source import TcpSource

MOVERS = ("shm", "nccl", "nixl", "zmq")
"""Best first."""
IN_THE_CLEAR = frozenset({"nccl", "nixl"})
"""Always: so only with --plaintext-kv."""
_ADAPTERS = Path("/sys/class/infiniband")


def offered(setting: str, plain_kv: bool) -> tuple[str, ...]:
    """What a worker offers its peers, best first; ``setting`` is a mover's name, or "auto": what is there and of use. Raises MoverError
    where the one that is forced is not there."""
    if setting == "nixl" and not nixl.is_installed():
        raise MoverError("the mover nixl needs the package of that name: pip install 'splitserve[nixl]'")
    if setting != "auto":
        return (setting,)
    rdma = plain_kv and nixl.is_installed() and _ADAPTERS.is_dir() and len(os.listdir(_ADAPTERS)) > 0
    return tuple(mover for mover in MOVERS if {"nccl": False, "nixl": rdma}.get(mover, True))


def open_source(met: Met, pool: Pool, plain_kv: bool = False) -> PutSource:
    """A way to put blocks of ``pool`` into the pool of the peer that said ``met``; between hosts in the clear where ``plain_kv`` and the
    peer agree. Raises MoverError."""
    if met.mover in IN_THE_CLEAR and not plain_kv:
        raise MoverError(f"the mover {met.mover} sends KV blocks in the clear, which this worker has not been allowed (--plaintext-kv)")
    if met.mover == "shm":
        return ShmSource(met.shm_name, met.num_blocks, pool)
    if met.mover == "nixl":
        return NixlSource(met.mover_address, met.num_blocks, pool)
    if met.mover == "nccl":
        return NcclSource(met.mover_address, HostMemory(pool), pool.shape)
    if met.mover == "zmq":
        return TcpSource(met.data_address, pool, plain_kv)
    raise MoverError(f"{met.worker_id} asks for the mover {met.mover!r}; this worker has {', '.join(MOVERS)}")
