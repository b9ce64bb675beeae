"""The movers that a worker offers, their receiving ends, and the sending end of the one that two workers
agreed on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import MoverError
from ..messages.messages import Met
from ..process.host import host_identity
from . import nixl
from .block_memory import BlockMemory, BlockPool, memory_of
from .communicator import Communicator, place_of
from .cuda_ipc import CudaIpcSource, CudaIpcTarget
from .cudart import LoadedCudart
from .interface import FALLBACK_MOVER, MoverEndpoints, PutSource, PutTarget
from .nccl import NcclSource, NcclTarget
from .nixl import NixlSource, NixlTarget
from .shm import SharedPool, ShmSource, ShmTarget
from .targets import MoverTargets
from .tcp.source import TcpSource
from .tcp.target import TcpTarget

MOVERS = ("cuda_ipc", "nccl", "shm", "nixl", "tcp")
"""Best first. On a GPU's pool tcp alone goes by host memory, and there is no shm."""
IN_THE_CLEAR = frozenset({"nccl", "nixl"})
"""These encrypt nothing: only with --plaintext-kv."""
_ADAPTERS = Path("/sys/class/infiniband")
_log = logging.getLogger(__name__)


def offered(setting: str, plain_kv: bool, on_gpu: bool) -> tuple[str, ...]:
    """Return the movers that a worker offers its peers, best first. ``setting``: a mover's name, or "auto":
    all that this worker can try, for two workers test each when they meet. Raises MoverError where the one
    that is forced is not usable."""
    if setting == "nixl" and not nixl.is_installed():
        raise MoverError("the mover nixl needs the package of that name: pip install 'splitserve[nixl]'")
    if setting == "cuda_ipc" and not on_gpu:
        raise MoverError(
            "the mover cuda_ipc is for KV caches on GPUs; this worker's is in host memory: choose "
            "auto, shm or tcp"
        )
    if setting == "shm" and on_gpu:
        raise MoverError(
            "the mover shm is for KV caches in host memory; this worker's is on a GPU: choose auto, cuda_ipc "
            "or tcp"
        )
    if setting != "auto":
        return (setting,)
    rdma = plain_kv and nixl.is_installed() and _ADAPTERS.is_dir() and len(os.listdir(_ADAPTERS)) > 0
    usable = {"cuda_ipc": on_gpu, "nccl": on_gpu and plain_kv, "shm": not on_gpu, "nixl": rdma, "tcp": True}
    return tuple(mover for mover in MOVERS if usable[mover])


def open_source(met: Met, pool: BlockPool, plain_kv: bool = False) -> PutSource:
    """A way to put blocks of ``pool`` into the pool of the peer that sent ``met``; between hosts in the clear
    where ``plain_kv`` and the peer agree. Raises MoverError."""
    if met.mover in IN_THE_CLEAR and not plain_kv:
        raise MoverError(
            f"the mover {met.mover} sends KV blocks in the clear, which this worker has not been "
            "allowed (--plaintext-kv)"
        )
    if met.mover == "cuda_ipc" and not isinstance(pool, np.ndarray):
        return CudaIpcSource(met.mover_address, met.num_blocks, pool, LoadedCudart)
    if met.mover == "shm" and isinstance(pool, np.ndarray):
        return ShmSource(met.shm_name, met.num_blocks, pool)
    if met.mover == "nccl":
        return nccl_source(met.mover_address, memory_of(pool), pool.shape)
    if met.mover == "nixl":
        return NixlSource(met.mover_address, met.num_blocks, pool)
    if met.mover == "tcp":
        return TcpSource(met.data_address, pool, plain_kv)
    raise MoverError(f"{met.worker_id} asks for the mover {met.mover!r}, which this worker has not")


def open_targets(
    offered: Sequence[str],
    pool: BlockPool,
    shared: SharedPool | None,
    data_listen: str,
    host: str,
    plaintext: bool,
) -> MoverTargets:
    """The receiving ends of the movers ``offered`` that work here, and of tcp. ``shared``: the pool's memory
    for shm; tcp listens on ``data_listen`` and is reached as ``host``. Raises AddressError, or MoverError
    where the only one does not work."""
    targets: dict[str, PutTarget] = {}
    shm_name = ""
    forced = len(offered) == 1
    if "cuda_ipc" in offered and not isinstance(pool, np.ndarray):
        _open(targets, "cuda_ipc", partial(CudaIpcTarget, pool, LoadedCudart), forced)
    if "shm" in offered and shared is not None:
        targets["shm"] = shm = ShmTarget(shared)
        shm_name = shm.shm_name
    if "nixl" in offered:
        _open(targets, "nixl", lambda: NixlTarget(pool), forced)
    if "nccl" in offered:
        targets["nccl"] = nccl_target(memory_of(pool), pool.shape)
    # also where another one is forced: it may fail
    targets[FALLBACK_MOVER] = tcp = TcpTarget(data_listen, pool, plaintext)
    movers = tuple(mover for mover in targets if mover in offered)
    endpoints = MoverEndpoints(movers, host_identity(), shm_name, tcp.data_address(host), gpu_of(pool))
    return MoverTargets(targets, endpoints)


def nccl_source(address: bytes, memory: BlockMemory, shape: tuple[int, ...]) -> NcclSource:
    """See ``NcclSource``."""
    return NcclSource(address, place_of(memory.device), memory, shape, partial(Communicator, memory.device))


def nccl_target(memory: BlockMemory, shape: tuple[int, ...]) -> NcclTarget:
    """See ``NcclTarget``."""
    return NcclTarget(place_of(memory.device), memory, shape, partial(Communicator, memory.device))


def gpu_of(pool: BlockPool) -> str:
    """Return the UUID of the GPU that holds the pool; an empty string for host memory."""
    return "" if isinstance(pool, np.ndarray) else place_of(pool.device).partition(" ")[2]


def _open(targets: dict[str, PutTarget], name: str, make: Callable[[], PutTarget], forced: bool) -> None:
    try:
        targets[name] = make()
    except MoverError as error:
        if forced:
            raise
        _log.warning("goes on without the mover %s: %s", name, error)
