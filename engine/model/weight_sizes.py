"""Sizes of a model's weights in memory."""

from __future__ import annotations

import math

from .config import ModelConfig
from .tensors import expected_tensors

QUANTISED_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 4.5 / 8}
"""Size of an element of a linear layer, with its part of the scales."""


def weight_bytes(config: ModelConfig, itemsize: int, quantization: str = "none") -> int:
    """Bytes of all weights, at ``itemsize`` bytes an element where it is not quantised."""
    linear = QUANTISED_BYTES.get(quantization, itemsize)
    layers: tuple[str, ...] = (config.tensors.layer.format(""),)
    if config.predicts and (names := config.tensors.prediction) is not None:
        layers += (f"{names.layer}.", names.joined)

    def size(name: str) -> float:
        if config.quantisation is not None:
            return config.quantisation.element_bytes(name, itemsize)
        return linear if name.startswith(layers) else itemsize

    return sum(int(size(name) * math.prod(shape)) for name, shape in expected_tensors(config).items())
