"""A receiver of handoffs, as a core is given one."""

from __future__ import annotations

from collections.abc import Callable

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.transport.handoff.receiver import HandoffReceiver
from splitserve.transport.messages.messages import Meet
from splitserve.transport.movers.interface import MoverEndpoints


def receiver(
    meet: Meet,
    blocks: BlockManager,
    room: Callable[[], tuple[int, int]] = lambda: (8, 0),
    movers: tuple[str, ...] = ("tcp",),
) -> HandoffReceiver:
    """That of the worker of this name."""
    endpoints = MoverEndpoints(movers, "h", "shm", "data")
    worker = (meet.worker_id, meet.incarnation)
    return HandoffReceiver(worker, meet.model, blocks, endpoints, room, lambda: b"s" * 16)
