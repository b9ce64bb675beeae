"""The features of a step's images."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...transport.messages.images import FIRST_IMAGE_ID, Image
from ..device import send
from ..errors import EngineError, is_out_of_memory, release_memory_of
from ..model.step_inputs import StepImages
from .batch import Batch, ImagePart

if TYPE_CHECKING:
    from ..vision.tower import ImageFeatures, VisionTower

MOST_BYTES = 64 << 20
"""Size of the features that are kept, for an image's next chunk and for other prompts with it. Where all of
it is cached but what is in no full block, the tower would run for a few tokens."""


class StepFeatures:
    """Each image is computed alone, with the first chunk that has tokens of it: its bits depend on nothing
    else."""

    def __init__(self, tower: VisionTower | None, device: torch.device) -> None:
        self._tower, self._device = tower, device
        self._kept: OrderedDict[bytes, ImageFeatures] = OrderedDict()  # by the image's name

    def of(self, batch: Batch) -> StepImages | None:
        """None: the batch has none. Raises EngineError."""
        if not batch.images:
            return None
        if self._tower is None:
            raise EngineError("this worker takes no images")
        parts = [self._of_part(batch, part) for part in batch.images]
        rows, features, *deep = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return StepImages(rows, features, deep)

    def _of_part(self, batch: Batch, part: ImagePart) -> list[Tensor]:
        image, tokens = part.image, batch.token_ids[part.row : part.row + part.count]
        if (features := self._kept.pop(image.name, None)) is None:
            features = self._compute(image)
        self._kept[image.name] = features
        ends = part.first + part.count == image.num_tokens
        while len(self._kept) + ends > 1 and sum(map(_num_bytes, self._kept.values())) > MOST_BYTES:
            self._kept.popitem(last=False)
        rows = part.row + (tokens >= FIRST_IMAGE_ID).nonzero()[0]
        own = slice(part.skipped, part.skipped + len(rows))
        if own.stop > len(features.rows):
            raise EngineError(
                f"an image of {image.width} x {image.height} has {len(features.rows)} features, and more "
                "tokens in its prompt: do the coordinator and this worker read the same model files?"
            )
        columns = [features.rows[own], *(layer[own] for layer in features.deep)]
        return [send(torch.from_numpy(rows), self._device), *columns]

    def _compute(self, image: Image) -> ImageFeatures:
        """Raises EngineError where memory is short, as smaller steps would not help."""
        for _ in range(2):
            try:
                return self._features(image)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                release_memory_of(error)
        raise EngineError(
            f"an image of {image.width} x {image.height} pixels does not fit into the worker's memory: send "
            "it smaller, or give the worker a smaller KV cache (--kv-cache-gib, --gpu-memory-utilization)"
        )

    def _features(self, image: Image) -> ImageFeatures:
        assert self._tower is not None, "see ``of``"
        pixels = torch.from_numpy(np.frombuffer(bytearray(image.pixels), np.uint8))
        return self._tower(send(pixels, self._device).view(image.height, image.width, 3))


def _num_bytes(features: ImageFeatures) -> int:
    return sum(rows.nbytes for rows in (features.rows, *features.deep))
