"""The ``nixl`` mover (optional extra ``splitserve[nixl]``): one-sided writes into the decode worker's pool,
over RDMA where there is any.

NIXL's UCX backend does the moving; the writer asks for completion by polling, and an answer that does not
come in time is an error. Bytes travel in the clear, and a process that reaches a UCX port is not
authenticated: for networks that are trusted (``--plaintext-kv``).

**Dead writers.** A writer on another host that has gone silent may still have writes under way. So every peer
gets an agent of its own at the decode worker: with it go the connection (TCP, where this process itself
writes what comes in) and the registration of the memory (RDMA, where the adapter then refuses). ``shut_out``
ends a peer's agent, and its blocks are free afterwards. That does not hold for UCX's shared-memory
transports and its CUDA IPC, where the writer's own process copies: they are left out unless UCX_TLS in the
environment names them.

A pool on a GPU is registered as such (VRAM): adapters write it directly, where driver and fabric allow it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import math
import os
import struct
import threading
import time
import uuid
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import MoverError
from ..messages.messages import PeerId
from .block_memory import BlockPool
from .interface import Arrival, BackgroundSource, Items, OneSidedTarget, layer_slice, runs

PUT_S, SLOWEST_BYTES_PER_S = 10.0, 50e6  # a put may take that long, and as long as its bytes at that rate
Descriptor: TypeAlias = tuple[int, int, int]
"""(address, bytes, number of the GPU or 0)"""
_BASE = struct.Struct("<Q")  # the pool's address in its process
_GPU = struct.Struct("<I")  # the number of its GPU there; only in addresses of pools on GPUs
_log = logging.getLogger(__name__)


def is_installed() -> bool:
    return importlib.util.find_spec("nixl") is not None


class _Place(NamedTuple):
    """A pool as NIXL sees it. ``device``: number of the GPU, or 0; ``kind``: of memory."""

    address: int
    num_bytes: int
    device: int
    kind: str

    @classmethod
    def of(cls, pool: BlockPool) -> _Place:
        """Raises MoverError for a pool on several GPUs."""
        if isinstance(pool, np.ndarray):
            return cls(pool.ctypes.data, pool.nbytes, 0, "DRAM")
        if len(pool.shards) > 1:
            raise MoverError("the mover nixl is for KV caches on one GPU; this worker's is on several")
        pointer, device, _ = pool.shards[0]
        return cls(pointer, math.prod(pool.shape), device.index or 0, "VRAM")

    @property
    def prefix(self) -> bytes:
        """Return the bytes before the metadata in this pool's NIXL address."""
        return _BASE.pack(self.address) + (_GPU.pack(self.device) if self.kind == "VRAM" else b"")


class NixlTarget(OneSidedTarget):
    """The receiving side: an agent for each peer met, and one spare for the next, made in the background (it
    takes half a second, or as long as registering the pool with an adapter takes)."""

    lingers = True

    def __init__(self, pool: BlockPool) -> None:
        """Raises MoverError where NIXL cannot work here."""
        self._pool = pool
        self._agents: dict[PeerId, _Agent] = {}
        self._spare: _Agent | None = _Agent(pool)
        self._making: threading.Thread | None = None
        self._ending: dict[PeerId, threading.Thread] = {}
        self._ended: set[PeerId] = set()  # of those in ``_ending``, whose agent is gone for certain

    def address(self, peer: PeerId) -> bytes | None:
        if peer not in self._agents:
            if peer in self._ending:
                return None
            if self._spare is None:
                self._make_spare()
                return None
            self._agents[peer], self._spare = self._spare, None
            self._make_spare()
        return self._agents[peer].address

    def shut_out(self, peer: PeerId) -> bool:
        """Takes a few tenths of a second, in the background: ask again."""
        if (agent := self._agents.pop(peer, None)) is not None:
            self._ending[peer] = threading.Thread(
                target=self._end, args=(peer, agent), name="nixl-agent-end", daemon=True
            )
            self._ending[peer].start()
        if peer in self._ended:
            self._ending.pop(peer).join()
            self._ended.discard(peer)
        return peer not in self._ending

    def close_all(self) -> None:
        """In the background: each agent takes a tenth of a second, and the loop may go on in another role."""
        threading.Thread(target=self._end_all, name="nixl-end").start()

    def _end_all(self) -> None:
        for thread in (*self._ending.values(), *([self._making] if self._making is not None else [])):
            thread.join()
        for agent in (*self._agents.values(), *([self._spare] if self._spare is not None else [])):
            agent.close()
        self._agents.clear()
        self._spare = None

    def _end(self, peer: PeerId, agent: _Agent) -> None:
        """End the agent, on a thread of its own. If that fails, ``shut_out`` never returns True: the peer's
        blocks stay in quarantine as long as this process lives."""
        try:
            agent.close()
        except Exception as error:  # NIXL's errors have no common type
            _log.error(
                "%s may still write KV blocks here, by an agent that NIXL does not end: %s", peer[0], error
            )
        else:
            self._ended.add(peer)

    def _make_spare(self) -> None:
        if self._making is None or not self._making.is_alive():
            self._making = threading.Thread(target=self._make, name="nixl-agent", daemon=True)
            self._making.start()

    def _make(self) -> None:
        try:
            self._spare = _Agent(self._pool)
        except MoverError as error:
            _log.warning("%s", error)  # the next peer's meeting tries again


class NixlSource(BackgroundSource):
    """The sending side: an agent for one peer."""

    def __init__(self, address: bytes, num_blocks: int, pool: BlockPool) -> None:
        """Raises MoverError where NIXL cannot work here, or not with that peer."""
        self._place, self._shape, self._num_blocks = _Place.of(pool), pool.shape, num_blocks
        size = len(self._place.prefix)  # the same at the peer: only pools on devices of one kind meet
        if len(address) <= size:
            raise MoverError("the decode worker gave no NIXL address")
        (self._peer_base,) = _BASE.unpack_from(address)
        (self._peer_device,) = _GPU.unpack_from(address, _BASE.size) if size > _BASE.size else (0,)
        super().__init__()
        self._agent = _Agent(pool)
        self._peer = self._agent.meet(address[size:])
        if not self._peer:
            self._agent.close()
            raise MoverError(
                "NIXL does not understand the decode worker's address: are the packages of one version?"
            )

    def put(
        self, lease: int, secret: bytes, items: Items, first_layer: int = 0, num_layers: int | None = None
    ) -> None:
        layers = layer_slice(self._shape, first_layer, num_layers)
        found = runs(items, layers, self._shape, self._num_blocks, self._place.address, self._peer_base)
        own = [(run.source, run.num_bytes, self._place.device) for run in found]
        peers = [(run.target, run.num_bytes, self._peer_device) for run in found]
        handle, error = self._agent.start(own, peers, self._peer)
        if handle is not None:  # also one that failed: some of its runs may land
            self._begin(lease, items, handle, PUT_S + sum(n for _, n, _ in own) / SLOWEST_BYTES_PER_S)
        if error:
            raise MoverError(f"NIXL cannot write to the decode worker: {error}")

    def poll(self) -> list[Arrival]:
        left: list[Arrival] = []
        for put in list(self._puts):
            status = self._agent.status(put.handle)
            if status == "DONE":
                self._puts.remove(put)
                self._agent.release(put.handle)
                left += put.arrivals
            elif status != "PROC" or time.monotonic() > put.deadline:
                failure = f"failed: {status}" if status != "PROC" else "was not complete in time"
                raise MoverError(f"a write by NIXL {failure}")
        return left

    def close(self) -> set[int]:
        """With the agent its connections end. What had left by them is with the adapters, or in sockets'
        buffers, and may still land."""
        leases = {put.lease for put in self._puts}
        while self._puts:
            self._agent.release(self._puts.pop().handle)
        self._agent.close()
        return leases


class _Agent:
    """A NIXL agent with the pool registered. Not used by two threads at once. It ends with the last reference
    to it, so NIXL's errors, whose tracebacks hold some, become words here."""

    def __init__(self, pool: BlockPool) -> None:
        """Raises MoverError."""
        place = _Place.of(pool)
        self._pool, self._kind = pool, place.kind  # the memory must be there as long as it is registered
        os.environ.setdefault("UCX_TLS", "^sm,cuda_ipc" if place.kind == "VRAM" else "^sm")
        try:
            api = importlib.import_module("nixl._api")
            logging.getLogger("nixl").setLevel(logging.WARNING)
            self._nixl = api.nixl_agent(f"splitserve-{uuid.uuid4()}", api.nixl_agent_config(backends=["UCX"]))
            self._registered = self._nixl.register_memory([(*place[:3], "")], place.kind)
            self.address: bytes = place.prefix + self._nixl.get_agent_metadata()
        except ImportError as error:
            raise MoverError(
                f"the mover nixl needs the package of that name: pip install 'splitserve[nixl]' ({error})"
            ) from None
        except Exception as error:  # NIXL's errors have no common type
            raise MoverError(
                f"NIXL does not work here: {error}; `ucx_info -d` shows what UCX finds, "
                "UCX_LOG_LEVEL=info why"
            ) from None

    def meet(self, metadata: bytes) -> Any:
        """The peer's name; None where ``metadata`` is no agent's."""
        try:
            return self._nixl.add_remote_agent(metadata)
        except Exception as error:
            _log.warning("NIXL refuses a peer's metadata: %s", error)
            return None

    def start(self, own: list[Descriptor], peers: list[Descriptor], peer: Any) -> tuple[Any, str]:
        """Return a handle of the write, if there is any, and what is wrong with it, if anything."""
        nixl, handle = self._nixl, None
        try:
            handle = nixl.initialize_xfer(
                "WRITE", nixl.get_xfer_descs(own, self._kind), nixl.get_xfer_descs(peers, self._kind), peer
            )
            return handle, "refused" if nixl.transfer(handle) == "ERR" else ""
        except Exception as error:
            return handle, str(error) or repr(error)

    def status(self, handle: Any) -> str:
        """PROC, DONE, or what is wrong."""
        try:
            status: str = self._nixl.check_xfer_state(handle)
        except Exception as error:
            return str(error)
        return status

    def release(self, handle: Any) -> None:
        """Also of a write under way, which then ends with the agent at the latest."""
        with contextlib.suppress(Exception):
            handle.release()

    def close(self) -> None:
        """When this returns nobody writes the pool by this agent any more."""
        self._nixl.deregister_memory(self._registered)
        del self._nixl
