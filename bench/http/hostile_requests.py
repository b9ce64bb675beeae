"""HTTP requests that a server should survive: valid, changed at random, cut short, wrongly framed, too large,
too deep, too slow.

Pure: what comes follows from the random generator alone.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from .badly_framed import BadlyFramed
from .hostile_parts import Attempt
from .well_framed import WellFramed


class HostileRequests:
    """An endless source. ``key``: an API key that is good, where one is asked for."""

    def __init__(self, random: Random, key: str = "", stalls: bool = True) -> None:
        self._random = random
        well, badly = WellFramed(random, key), BadlyFramed(random, key)
        kinds: dict[Callable[[], Attempt], float] = {
            well.valid: 6,
            well.other_fields: 30,
            well.other_json: 14,
            well.other_page: 10,
            well.pipelined: 1.5,
            well.deep: 0.4,
            well.slow: 2,
            well.wrong_key: 3,
            badly.huge_headers: 0.5,
            badly.changed: 14,
            badly.cut: 6,
            badly.noise: 3,
            badly.wrong_length: 4,
            badly.bad_chunks: 3,
            badly.websocket: 1,
            well.upgrade: 4,
            badly.other_heads: 6,
            badly.long_extensions: 0.3,
            badly.stalled: 0.02 if stalls else 0,
        }
        self._kinds, self._weights = list(kinds), list(kinds.values())

    def next(self) -> Attempt:
        return self._random.choices(self._kinds, self._weights)[0]()
