"""A step that has been submitted, as the worker's loop follows it."""

from __future__ import annotations

from collections.abc import Callable

from ..engine.step.layer_progress import LayerProgress
from ..engine.worker_model import WorkerModel
from .scheduler import PrefillStep


class RunningStep:
    """``stride``: every how many layers keys and values are to leave; 0: not before the step has ended. ``wake``: more layers are done."""

    def __init__(self, step: PrefillStep, stride: int, model: WorkerModel, wake: Callable[[], None]) -> None:
        self.step, self._stride = step, stride
        self._half = max(1, model.num_layers // 2)
        half = 0 if model.launch is None else self._half  # of interest where the next step is launched ahead
        self.progress = LayerProgress(model.device, wake, min(filter(None, (stride, half)), default=0))

    @property
    def is_half_done(self) -> bool:
        return self.progress.num_layers() >= self._half

    def num_layers_to_send(self) -> int:
        """Layers whose keys and values are final and may leave by now; 0: none."""
        return self.progress.num_layers() // self._stride * self._stride if self._stride else 0
