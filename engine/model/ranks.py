"""The ranks of a worker: each computes a part of every layer (tensor parallelism; Shoeybi et al.,
Megatron-LM, 2019, section 3).

Heads, the columns of MLPs and of experts, and the rows of the vocabulary are split evenly, or each rank has
whole experts (``expert_split.py``). The output
projection and the last product of an MLP have a part of their inputs on each rank, and are summed over ranks.
In exact mode they have a part of their outputs instead, and all inputs are brought to all ranks: no sum is
split, so that every number of ranks gives the same bits (experts excepted). Norms, routers, the table of
embeddings are every rank's own; so are latent vectors in exact mode. Otherwise these are spread over ranks,
block by block (``block_spread.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ...kernels.mixture_shape import MixtureShape
from ..errors import ModelConfigError
from .config import ModelConfig
from .expert_split import some_for_each
from .mamba_config import MambaConfig
from .mixture_config import MixtureConfig
from .short_conv_config import ShortConvConfig

T = TypeVar("T")
MOST_RANKS = 64


class Rank:
    """One of ``size``; and alone, without anything to do for the others. All ranks make the same calls in the
    same order."""

    num_calls = 0  # so far, of those that GPUs are given: there threads do not wait for each other

    def __init__(self, number: int = 0, size: int = 1) -> None:
        self.number, self.size = number, size

    def part(self, total: int) -> slice:
        """Which of ``total`` heads or columns are this rank's."""
        width = total // self.size
        return slice(self.number * width, (self.number + 1) * width)

    def kv_heads(self, total: int) -> slice:
        """Which key-value heads; where there are more ranks than heads, several have the same."""
        first = self.number * total // self.size
        return slice(first, first + max(1, total // self.size))

    def tokens(self, vocab_size: int) -> slice:
        """Which rows of the vocabulary; the last rank may have fewer."""
        width = -(-vocab_size // self.size)
        return slice(self.number * width, min(vocab_size, (self.number + 1) * width))

    def rows(self, *totals: int) -> Tensor | None:
        """This rank's part of each of several matrices side by side: int64; None: all."""
        if self.size == 1:
            return None
        starts = (sum(totals[:i]) for i in range(len(totals)))
        parts = [range(total)[self.part(total)] for total in totals]
        return torch.tensor([start + row for start, part in zip(starts, parts, strict=True) for row in part])

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, with the same bits on each. ``x`` may be overwritten."""
        return x

    def joined(self, part: Tensor, width: int) -> Tensor:
        """The parts of all ranks side by side, [n, width]; the last rank's may be narrower."""
        return part

    def exchanged(self, parts: Tensor) -> Tensor:
        """``parts`` [size, ...]: one for each rank. Return [size, ...]: the part of each for this one."""
        return parts

    def shared(self, tokens: Tensor | None, count: int) -> Tensor:
        """Return the int32 [count] that rank 0 gives."""
        assert tokens is not None
        return tokens

    def agreed(self, number: float) -> float:
        """Return the number of rank 0."""
        return number

    def checked(self, output: T) -> T:
        """Return what a step gave; raises DeviceLostError where a rank has failed meanwhile."""
        return output

    def fail(self) -> None:
        """No rank can go on with the step: what waits for this one, now or later in the step, raises."""

    def forget(self) -> None:
        """All ranks have ended a step that failed, and none has begun another: drop what was given in it."""


ALONE = Rank()


def spreads_blocks(config: ModelConfig, size: int, exact: bool) -> bool:
    """Whether each KV block lies on one rank (``block_spread.py``), not a part of it on each. In exact mode
    every rank has all latent vectors: a merged sum would depend on the number of ranks. So it is with an
    index, too, which chooses among all tokens."""
    return config.latent is not None and config.index is None and size > 1 and not exact


def of_rank(config: ModelConfig, rank: Rank) -> ModelConfig:
    """The sizes of this rank's part."""
    latent, mixture, size = config.latent, config.mixture, rank.size
    heads = rank.kv_heads(config.num_kv_heads)
    if mixture is not None:
        mixture = replace(mixture, shape=own_experts(mixture, rank))
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=heads.stop - heads.start,
        intermediate_size=config.intermediate_size // size,
        latent=None if latent is None else replace(latent, num_heads=latent.num_heads // size),
        mixture=mixture,
        full_heads=None if config.full_heads is None else config.full_heads.of_rank(size),
        recurrent=None if config.recurrent is None else config.recurrent.of_rank(size),
    )


def own_experts(mixture: MixtureConfig, rank: Rank) -> MixtureShape:
    """This rank's part: see ``split_experts``. Of whole experts the first ranks may have one more."""
    shape, size, number = mixture.shape, rank.size, rank.number
    shared = shape.shared_size // size
    if mixture.whole_shared:
        shared = 0 if number else shape.shared_size
    if not mixture.whole_experts:
        return replace(shape, intermediate_size=shape.intermediate_size // size, shared_size=shared)
    each, more = divmod(shape.num_experts, size)
    first = number * each + min(number, more)
    return replace(shape, shared_size=shared, own=range(first, first + each + (number < more)))


def check_split(config: ModelConfig, size: int, exact: bool, whole_experts: bool = False) -> None:
    """Raise ModelConfigError where the model cannot be split among ``size`` ranks. ``whole_experts``: as
    asked for; slices of them fit more ranks than there are experts."""
    if size == 1:
        return
    sizes = {"attention heads": config.num_heads}
    if config.full_heads is not None:
        sizes["key-value heads of full attention"] = config.full_heads.num_kv_heads
    if exact:
        sizes["hidden numbers"] = config.hidden_size
    if isinstance(config.recurrent, ShortConvConfig):
        sizes["channels of a convolution"] = config.recurrent.shape.channels
    mixture = config.mixture
    if mixture is None or mixture.names.beside or not all(mixture.layers):
        sizes["columns of an MLP"] = config.intermediate_size
    one_rank_a_head = config.full_heads is not None or config.recurrent is not None

    groups = config.recurrent.shape.num_key_heads if isinstance(config.recurrent, MambaConfig) else 1

    def fits(count: int) -> bool:
        heads = config.num_kv_heads
        return (
            not any(total % count for total in sizes.values())
            and (heads % count == 0 or (count % heads == 0 and not one_rank_a_head))
            and (groups % count == 0 or count % groups == 0)
            and some_for_each(config, count, whole_experts)
        )

    if not fits(size):
        possible = ", ".join(str(count) for count in range(2, MOST_RANKS + 1) if fits(count)) or "none"
        found = ", ".join(f"{total} {name}" for name, total in sizes.items())
        if mixture is not None and not some_for_each(config, size, whole_experts):
            raise ModelConfigError(
                f"--tensor-parallel-size {size}: each rank needs a whole one of {mixture.shape.num_experts} "
                f"experts (possible: {possible})"
            )
        raise ModelConfigError(
            f"--tensor-parallel-size {size} does not divide {found} and {config.num_kv_heads} key-value "
            f"heads evenly (possible: {possible})"
        )
