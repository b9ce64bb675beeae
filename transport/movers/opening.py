"""Which movers a worker offers, and from a decode worker's ``Met`` to the one that both agreed on."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from msgspec.structs import replace

from ..channels.host import host_identity
from ..errors import MoverError
from ..handoff.handoff import FALLBACK_MOVER, FORMER_NAME, PeerId
from ..handoff.receiver import MoverEndpoints
from ..handoff.ways_in import WaysIn
from ..messages.messages import Message, Met
from . import nixl
from .block_memory import DevicePool, HostMemory
from .cuda_ipc import CudaIpcSource, CudaIpcTarget, LoadedCudart
from .interface import Arrival, Pool, PutSource, PutTarget, as_talking_target
from .nccl import NcclSource, NcclTarget
from .nixl import NixlSource, NixlTarget
from .shm import SharedPool, ShmSource, ShmTarget
from .tcp_source import TcpSource
from .tcp_target import TcpTarget

MOVERS = ("cuda_ipc", "shm", "nccl", "nixl", "tcp")
"""Best first."""
IN_THE_CLEAR = frozenset({"nccl", "nixl"})
"""Always: so only with --plaintext-kv."""
ON_DEVICE = frozenset({"cuda_ipc", "nccl"})
"""They move blocks of a pool on a GPU from there to there; the others by its mirror in host memory."""
BY_NAME = frozenset({"cuda_ipc", "nccl"})
"""Left out of "auto" until they have run on GPUs."""
_ADAPTERS = Path("/sys/class/infiniband")


def offered(setting: str, plain_kv: bool, on_gpu: bool) -> tuple[str, ...]:
    """What a worker offers its peers, best first; ``setting`` is a mover's name, or "auto": what is there and of use. Raises MoverError
    where the one that is forced is not there."""
    if setting == "nixl" and not nixl.is_installed():
        raise MoverError("the mover nixl needs the package of that name: pip install 'splitserve[nixl]'")
    if setting == "cuda_ipc" and not on_gpu:
        raise MoverError("the mover cuda_ipc is for KV caches on GPUs; this worker's is in host memory: choose auto, shm or tcp")
    if setting != "auto":
        return (setting,)
    rdma = plain_kv and nixl.is_installed() and _ADAPTERS.is_dir() and len(os.listdir(_ADAPTERS)) > 0
    return tuple(mover for mover in MOVERS if mover not in BY_NAME and (mover != "nixl" or rdma))


def open_source(met: Met, pool: Pool, plain_kv: bool = False, device: DevicePool | None = None) -> PutSource:
    """A way to put blocks of ``pool``, or of the pool on a ``device`` where the mover leaves them there, into the pool of the peer that
    said ``met``; between hosts in the clear where ``plain_kv`` and the peer agree. Raises MoverError."""
    if met.mover in IN_THE_CLEAR and not plain_kv:
        raise MoverError(f"the mover {met.mover} sends KV blocks in the clear, which this worker has not been allowed (--plaintext-kv)")
    if met.mover == "cuda_ipc" and device is not None:
        cuda = LoadedCudart(device.device.index or 0)
        return CudaIpcSource(met.mover_address, met.num_blocks, device.pointer, device.shape, cuda)
    if met.mover == "shm":
        return ShmSource(met.shm_name, met.num_blocks, pool)
    if met.mover == "nccl":
        return NcclSource(met.mover_address, device or HostMemory(pool), pool.shape)
    if met.mover == "nixl":
        return NixlSource(met.mover_address, met.num_blocks, pool)
    if met.mover == "tcp":
        return TcpSource(met.data_address, pool, plain_kv)
    raise MoverError(f"{met.worker_id} asks for the mover {met.mover!r}, which this worker has not")


_log = logging.getLogger(__name__)


class MoverTargets:
    """``endpoints`` is what the receiving core tells of them."""

    def __init__(
        self,
        offered: Sequence[str],
        pool: Pool,
        shared: SharedPool | None,
        data_listen: str,
        host: str,
        plaintext: bool,
        device: DevicePool | None = None,
    ) -> None:
        """Of the movers ``offered`` those that work here, and tcp: ``shared`` is the pool's memory for shm; tcp listens on
        ``data_listen``, is reached as ``host``. Raises AddressError, or MoverError where the only one does not work."""
        self._targets: dict[str, PutTarget] = {}
        shm_name = ""
        if "cuda_ipc" in offered and device is not None:
            self._targets["cuda_ipc"] = CudaIpcTarget(device.pointer, LoadedCudart(device.device.index or 0))
        if "shm" in offered and shared is not None:
            self._targets["shm"] = shm = ShmTarget(shared)
            shm_name = shm.shm_name
        if "nixl" in offered:
            self._open_nixl(pool, forced=len(offered) == 1)
        if "nccl" in offered:
            self._targets["nccl"] = NcclTarget(device or HostMemory(pool), pool.shape)
        self._targets[FALLBACK_MOVER] = tcp = TcpTarget(data_listen, pool, plaintext)  # also where another one is forced: it may fail
        self.ways_in = WaysIn(self._targets, _log.warning)
        movers = tuple(mover for mover in self._targets if mover in offered)
        self.endpoints = MoverEndpoints(movers, host_identity(), shm_name, tcp.data_address(host))

    def _open_nixl(self, pool: Pool, forced: bool) -> None:
        try:
            self._targets["nixl"] = NixlTarget(pool)
        except MoverError as error:
            if forced:
                raise
            _log.warning("goes on without the mover nixl: %s", error)

    @property
    def fds(self) -> list[int]:
        """To be polled for reading."""
        return [target.fd for target in self._targets.values() if target.fd is not None]

    def complete(self, met: Met, peer: PeerId) -> Met | None:
        """``met`` with what this peer's mover needs. None: not ready, the peer will ask again."""
        if met.refused or not met.mover:
            return met
        mover = FALLBACK_MOVER if met.mover == FORMER_NAME else met.mover
        address = self._targets[mover].address(peer)
        if address is None:
            return None
        self.ways_in.met(peer, mover)
        return replace(met, mover_address=address)

    def open(self, lease: int, secret: bytes, positions: Mapping[int, int]) -> None:
        for target in self._targets.values():
            target.open(lease, secret, positions)

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        for target in self._targets.values():
            target.expect_again(lease, positions)

    def close(self, lease: int) -> None:
        for target in self._targets.values():
            target.close(lease)

    def hear(self, peer: PeerId, message: Message) -> None:
        """One of BETWEEN_MOVERS."""
        for target in self._targets.values():
            if (talking := as_talking_target(target)) is not None:
                talking.hear(peer, message)

    def words(self) -> list[tuple[PeerId, Message]]:
        """What movers have to say to their other ends."""
        return [word for target in self._targets.values() if (talking := as_talking_target(target)) is not None for word in talking.words()]

    def poll(self, ready: AbstractSet[object], limit: int) -> list[Arrival]:
        """What has arrived by movers whose descriptor is among ``ready``, up to ``limit`` blocks each."""
        return [arrival for target in self._targets.values() if target.fd in ready for arrival in target.poll(limit)]

    def close_all(self) -> None:
        for target in self._targets.values():
            target.close_all()
