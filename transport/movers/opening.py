"""From a decode worker's ``Met`` to the mover that both agreed on."""

from __future__ import annotations

from ..errors import MoverError
from ..messages import Met
from .interface import Pool, PutSource
from .shm import ShmSource
from .tcp_source import TcpSource

MOVERS = ("shm", "zmq")
"""Best first."""


def open_source(met: Met, pool: Pool, plain_kv: bool = False) -> PutSource:
    """A way to put blocks of ``pool`` into the pool of the peer that said ``met``; between hosts in the clear where ``plain_kv`` and the
    peer agree. Raises MoverError."""
    if met.mover == "shm":
        return ShmSource(met.shm_name, met.num_blocks, pool)
    if met.mover == "zmq":
        return TcpSource(met.data_address, pool, plain_kv)
    raise MoverError(f"{met.worker_id} asks for the mover {met.mover!r}; this worker has {', '.join(MOVERS)}")
