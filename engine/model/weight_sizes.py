"""Sizes of a model's weights in memory."""

from __future__ import annotations

import math

from .config import ModelConfig
from .tensors import expected_tensors

QUANTISED_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 4.5 / 8}
"""Size of an element of a linear layer, with its part of the scales."""


def weight_bytes(config: ModelConfig, itemsize: int, quantization: str = "none") -> int:
    """Bytes of all weights, at ``itemsize`` bytes an element where it is not quantised."""
    return sum(_sizes(config, itemsize, quantization).values())


def uneven_bytes(config: ModelConfig, itemsize: int, num_ranks: int) -> int:
    """Bytes of rank 0 above an even part of all weights: no rank has more experts than it."""
    mixture, more = config.mixture, 0.0
    if mixture is None or num_ranks == 1:
        return 0
    count, names, sizes = mixture.shape.num_experts, mixture.names, _sizes(config, itemsize)
    routed = [f".{of.partition('{}')[0]}" for of in (names.gate, names.up, names.down) if of]
    parts = [(routed, -(-count // num_ranks) / count)] * mixture.whole_experts
    parts += [([f".{of}" for of in names.shared if of], 1.0)] * mixture.whole_shared
    for within, part in parts:
        of_experts = sum(size for name, size in sizes.items() if any(own in name for own in within))
        more += (part - 1 / num_ranks) * of_experts
    return round(more)


def _sizes(config: ModelConfig, itemsize: int, quantization: str = "none") -> dict[str, int]:
    linear = QUANTISED_BYTES.get(quantization, itemsize)
    layers: tuple[str, ...] = (config.tensors.layer.format(""),)
    if config.predicts and (names := config.tensors.prediction) is not None:
        layers += (f"{names.layer}.", names.joined)

    def size(name: str) -> float:
        if config.quantisation is not None:
            return config.quantisation.element_bytes(name, itemsize)
        return linear if name.startswith(layers) else itemsize

    return {name: int(size(name) * math.prod(shape)) for name, shape in expected_tensors(config).items()}
