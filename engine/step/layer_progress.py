"""The number of layers of a step whose keys and values are in the cache.

The thread that computes reports it, and the worker's loop reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class LayerProgress:
    """The progress of one step.

    The step's thread calls ``reached``, the loop all else; ``wake`` signals progress to the loop.

    On a CPU a layer that the thread has passed is written. A GPU's kernels run later than the thread: there
    an event in the stream marks it, which the loop polls while ``pending``.
    """

    def __init__(self, device: torch.device, wake: Callable[[], None], every: int) -> None:
        """``every``: report after each group of this many layers; 0: never."""
        self._wake, self._every = wake, every
        self._on_gpu = device.type == "cuda"
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()
        self._num_layers = 0

    def reached(self, num_layers: int) -> None:
        """The step's thread has written (on a GPU: launched) the keys and values of the first ``num_layers``
        layers."""
        if not self._every or num_layers % self._every:
            return
        if self._on_gpu:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream())
            self._events.append((num_layers, event))
        else:
            self._num_layers = num_layers
        self._wake()

    def num_layers(self) -> int:
        """Layers whose keys and values are final; 0 before the first."""
        while self._events and self._events[0][1].query():  # type: ignore[no-untyped-call]
            self._num_layers = self._events.popleft()[0]
        return self._num_layers

    @property
    def pending(self) -> bool:
        """Ask again soon: a GPU has been given layers that it has not reached yet."""
        return bool(self._events)
