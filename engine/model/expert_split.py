"""How ranks share a mixture's experts: each has a slice of every expert's columns, or whole experts.

Slices give all ranks the same work whatever a step's tokens choose: a decode step of one token with 8 of 128
experts on 8 ranks reads one expert's worth on each, where the busiest of ranks with whole experts has two or
three. Whole experts have wider products, and each rank gathers and adds up its own choices' rows, not all:
that is for large steps. So slices are the default, ``--expert-parallel`` asks for whole experts, by role, and
ranks have these by themselves where slices do not fit.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from ..errors import ModelConfigError
from .config import ModelConfig
from .gguf_types import BLOCKS, packed_bytes
from .mixture_config import MixtureConfig
from .quantisation import TensorScheme

logger = logging.getLogger(__name__)


def split_experts(config: ModelConfig, size: int, whole: bool = False) -> ModelConfig:
    """Decide it for ``size`` ranks. ``whole``: whole experts, whether slices fit or not. Raises
    ModelConfigError where there are no experts."""
    mixture = config.mixture
    if mixture is None:
        if whole:
            raise ModelConfigError("--expert-parallel: the model has no experts; leave it out")
        return config
    if size == 1:
        return config
    names, shape = mixture.names, mixture.shape
    whole = whole or not _sliced(config, mixture, names.down.format(0), shape.intermediate_size, size)
    alone = shape.shared_size > 0 and not _sliced(config, mixture, names.shared[2], shape.shared_size, size)
    return replace(config, mixture=replace(mixture, whole_experts=whole, whole_shared=alone))


def some_for_each(config: ModelConfig, size: int, whole: bool) -> bool:
    """Whether each of ``size`` ranks has a part of the experts, if there are any; ``whole``: see
    ``split_experts``."""
    if (mixture := config.mixture) is None or size <= mixture.shape.num_experts:
        return True
    split = split_experts(config, size, whole).mixture
    return split is not None and not split.whole_experts


def log_split(mixture: MixtureConfig, size: int, asked: bool) -> None:
    """Log where ranks have other parts than slices. ``asked``: for whole experts."""
    shape = mixture.shape
    if mixture.whole_experts and not asked:
        logger.info(
            "%d columns of an expert do not fit %d ranks: each has whole experts, as with --expert-parallel",
            shape.intermediate_size, size,
        )  # fmt: skip
    if mixture.whole_shared:
        logger.info(
            "%d columns of the shared expert do not fit %d ranks: rank 0 alone computes it",
            shape.shared_size, size,
        )  # fmt: skip


def _sliced(config: ModelConfig, mixture: MixtureConfig, down: str, columns: int, size: int) -> bool:
    """Whether this expert's columns divide, in each layer's form. Expert 0 stands for a layer's others."""
    if columns % size:
        return False
    if config.quantisation is None:
        return True
    layers = (config.tensors.mlp_name(i) for i, sparse in enumerate(mixture.layers) if sparse)
    schemes = {config.quantisation.of(f"{layer}.{down}".removesuffix(".weight")) for layer in layers}
    return all(scheme is None or _divides(scheme, columns, size) for scheme in schemes)


def _divides(scheme: TensorScheme, columns: int, size: int) -> bool:
    """``QuantisedWeight.columns`` can cut inputs into ``size`` equal parts, where they are in order."""
    part, group, bits = columns // size, scheme.group_size or columns, scheme.bits
    if scheme.block is not None:
        group = scheme.block[1]
    if scheme.kind:
        group, bits = BLOCKS[scheme.kind][0], 4 if packed_bytes(scheme.kind) < 1 else 8
    if part % group == 0:
        return True
    within = group % part == 0 or group >= columns
    return within and part % (8 // bits) == 0 and not scheme.kind.endswith("_K")
