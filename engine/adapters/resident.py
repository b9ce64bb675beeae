"""The adapters that a model holds at once, on all of its ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from ..loaded_model import LoadedModel
from ..model.adapters import Pairs, RankAdapters
from .files import AdapterFile

OF_LAYERS = re.compile(r"^model\.(language_model\.)?layers\.")


class ResidentAdapters:
    """``put`` may be called from any one thread, while steps run that do not use the slot."""

    def __init__(self, ranks: Sequence[LoadedModel]) -> None:
        self._ranks = [(rank, adapters) for rank in ranks if (adapters := rank.adapters) is not None]
        gpus = [rank.device if rank.device.type == "cuda" else None for rank, _ in self._ranks]
        self._streams = [
            None if gpu is None else torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
            for gpu in gpus
        ]

    @property
    def _first(self) -> RankAdapters:
        return self._ranks[0][1]

    @property
    def num_slots(self) -> int:
        return self._first.num_slots

    def check(self, file: AdapterFile) -> None:
        """Raise AdapterError where it does not fit the model."""
        self._first.check(self._as_stored(file))

    def put(self, slot: int, file: AdapterFile) -> None:
        """Place a checked adapter: batches may name ``file.content`` once this has returned."""
        for (_, adapters), stream in zip(self._ranks, self._streams, strict=True):
            with torch.inference_mode(), torch.cuda.stream(stream):  # no effect if it is None
                adapters.put(slot, file.content, self._as_stored(file))
            if stream is not None:
                stream.synchronize()

    def _as_stored(self, file: AdapterFile) -> Pairs:
        """By the names that checkpoints have. Of Nemotron and of models with several parts transformers' own
        are others."""
        ours = f"{self._first.text_model}layers."
        return {OF_LAYERS.sub(ours, name): pair for name, pair in file.layers.items()}
