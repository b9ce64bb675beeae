"""From a decode worker's ``Met`` to the mover that both agreed on."""

from __future__ import annotations

from ..errors import MoverError
from ..messages import Met
from .interface import Pool, PutSource
from .shm import ShmSource
from .zmq_source import ZmqSource

MOVERS = ("shm", "zmq")
"""Best first."""


def open_source(met: Met, pool: Pool) -> PutSource:
    """A way to put blocks of ``pool`` into the pool of the peer that said ``met``. Raises MoverError."""
    if met.mover == "shm":
        return ShmSource(met.shm_name, met.num_blocks, pool)
    if met.mover == "zmq":
        return ZmqSource(met.data_address, pool)
    raise MoverError(f"{met.worker_id} asks for the mover {met.mover!r}; this worker has {', '.join(MOVERS)}")
