"""When another pass over the queue is not worth while. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from .overtaking import Overtaking
from .pools import Pools
from .request import Request
from .request_queue import RequestQueue


class Blocked(NamedTuple):
    """Proof that another pass over the queue would place nothing.

    Holds until the queue or the workers change, or a worker has room for the shortest request that was turned
    away; of those whose adapter only some workers have, two of these.
    """

    queue_version: int
    pools_version: int
    order_version: int | None  # None: holds whatever the order
    shortest_prompt: float  # tokens; no prefill worker had room for it
    shortest_sequence: float  # tokens; no decode worker had room for it
    turned_away: Mapping[str, float]  # as Overtaking has it

    def keeps(self, request: Request) -> bool:
        """Whether one no longer than this was turned away."""
        least = min(self.shortest_prompt, self.shortest_sequence, self.turned_away.get(request.adapter, inf))
        return request.num_tokens >= least

    def holds(self, queue: RequestQueue, pools: Pools, overtaking: Overtaking) -> bool:
        """Whether nothing has changed since the pass that could help."""
        return (
            self.queue_version == queue.version
            and self.pools_version == pools.version
            and self.order_version in (None, queue.order_version)
            and pools.open_of_role("prefill").max_room < self.shortest_prompt
            and pools.open_of_role("decode").max_room < self.shortest_sequence
            and pools.reserves_of_role("prefill").max_room < self.shortest_prompt
            and pools.reserves_of_role("decode").max_room < self.shortest_sequence
            and overtaking.lack_room(self.turned_away)
        )
