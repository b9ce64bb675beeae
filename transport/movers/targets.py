"""All the ways in which a decode worker takes KV blocks in, as one: leases are opened and closed on every one of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from ..channels.host import host_identity
from ..errors import MoverError
from ..handoff.handoff import FALLBACK_MOVER, PeerId
from ..handoff.receiver import MoverEndpoints
from ..handoff.ways_in import WaysIn
from ..messages.messages import Message, Met
from .block_memory import DevicePool, HostMemory
from .cuda_ipc import CudaIpcTarget
from .cuda_runtime import LoadedCudart
from .interface import Arrival, Pool, PutTarget, as_talking_target
from .nccl_target import NcclTarget
from .nixl import NixlTarget
from .shm import SharedPool, ShmTarget
from .tcp_target import TcpTarget

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
        """Of the movers ``offered`` those that work here, and zmq: ``shared`` is the pool's memory for shm; zmq listens on
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
        address = self._targets[met.mover].address(peer)
        if address is None:
            return None
        self.ways_in.met(peer, met.mover)
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
