"""Steps of layers that keep a state, for the tests of all their kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor

from splitserve.bench.kernels.kernel_inputs import randn
from splitserve.kernels.delta_net import DeltaNetShape, DeltaNetWeights, read_heads, write_heads
from splitserve.kernels.short_conv import ShortConvShape, ShortConvWeights
from splitserve.kernels.state_shape import NO_STATE, PADDING, StatePlace, num_state_blocks, spaced_floats
from splitserve.kernels.states import StateInputs, read_state


class Kernel(Protocol):
    """See ``interface.Kernels.delta_net`` and ``short_conv``."""

    def __call__(
        self,
        projected: Tensor,
        pool: Tensor,
        place: StatePlace,
        shape: Any,
        weights: Any,
        inputs: StateInputs,
    ) -> Tensor: ...


BLOCK_SIZE, NUM_LAYERS, LAYER = 8, 2, 1


@dataclass(frozen=True)
class Part:
    """What a sequence does in a step; see ``StateInputs``."""

    num_tokens: int
    source: int = NO_STATE
    mark: int = 0


@st.composite
def parts(draw: st.DrawFn, longest: int) -> list[Part]:
    """Some sequences, padding among them."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.just(1) | st.integers(1, longest))
        source = draw(st.sampled_from([NO_STATE, 0, 1, PADDING]))
        found.append(Part(tokens, source, draw(st.just(0) | st.integers(0, tokens))))
    return found


def shape_of(kv_heads: int, keys_of_each: int, values_of_key: int, dim: int, conv_size: int) -> DeltaNetShape:
    num_keys = kv_heads * keys_of_each
    return DeltaNetShape(num_keys, num_keys * values_of_key, dim, dim, conv_size)


def mamba_shape(kv_heads: int, num_keys: int, values_of_each: int, dim: int, conv_size: int) -> DeltaNetShape:
    """``values_of_each``: of a key head or a key-value head, whichever are more."""
    num_values = values_of_each * max(kv_heads, num_keys)
    return DeltaNetShape(num_keys, num_values, 2 * dim, dim, conv_size, delta_rule=False)


def weights_of(
    shape: DeltaNetShape | ShortConvShape, dtype: torch.dtype
) -> DeltaNetWeights | ShortConvWeights:
    if isinstance(shape, ShortConvShape):
        conv = randn(shape.conv_size, shape.channels, seed=1)
        return ShortConvWeights(conv, randn(shape.channels, seed=2) if shape.conv_size % 2 else None)
    of_heads = [randn(shape.num_value_heads, seed=seed) for seed in (2, 3, 7)]
    conv = randn(shape.channels, shape.conv_size, dtype=dtype, seed=1)
    if not shape.delta_rule:
        bias = randn(shape.channels, seed=8) if shape.conv_size % 2 else None
        return DeltaNetWeights(conv, of_heads[0].exp() / 8, of_heads[1], conv_bias=bias, skip=of_heads[2])
    return DeltaNetWeights(
        conv,
        of_heads[0].exp(),
        of_heads[1],
        1 + randn(shape.value_dim, seed=4) / 4,
        1e-6,
        beta_scale=2.0 if shape.conv_size == 2 else 1.0,
    )


@dataclass(frozen=True)
class Case:
    """A model's layer and a pool in which every block holds random numbers."""

    shape: DeltaNetShape | ShortConvShape
    weights: DeltaNetWeights | ShortConvWeights
    place: StatePlace
    pool: Tensor
    table: int  # blocks in a table

    def inputs(self, parts: Sequence[Part]) -> StateInputs:
        """Tables have states of other layers before this one's and a block behind it, in no order."""
        length = self.table
        blocks = torch.randperm(len(self.pool), generator=torch.Generator().manual_seed(1))
        tables = blocks[: len(parts) * 3 * length].view(len(parts), 3, length).int()
        starts = torch.tensor([0, *(part.num_tokens for part in parts)]).cumsum(0).int()
        sources, marks = [part.source for part in parts], [part.mark for part in parts]
        return StateInputs(
            starts, tables, torch.tensor(sources, dtype=torch.int32), torch.tensor(marks, dtype=torch.int32)
        )

    def projected(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        """Every third token's gates far from zero, if it has any."""
        x = randn(num_tokens, self.shape.width, dtype=dtype, seed=5)
        if isinstance(self.shape, DeltaNetShape):
            x[1::3, -2 * self.shape.num_value_heads :] *= 60 if self.shape.delta_rule else 3
        return x

    def run(self, kernel: Kernel, projected: Tensor, pool: Tensor, parts: Sequence[Part]) -> Tensor:
        return kernel(projected, pool, self.place, self.shape, self.weights, self.inputs(parts))


def case_of(
    shape: DeltaNetShape | ShortConvShape, num_kv_heads: int, dtype: torch.dtype, first: int = 0,
    num_seqs: int = 1, pool_dtype: torch.dtype | None = None,
) -> Case:  # fmt: skip
    """A head's keys in a block hold two rows of a state, or more. ``first``: layers whose states lie before
    this one's; where it is odd, runs have an end that may hold no row."""
    pool_dtype = pool_dtype or dtype
    run_bytes = 4 * (-(-2 * max(shape.row, 4) // 8) * 8 + 8 * (first % 2))
    table = num_state_blocks(shape, num_kv_heads, run_bytes, first + 1) + 1
    num_blocks = 3 * num_seqs * table + 2
    sizes = (
        num_blocks,
        NUM_LAYERS,
        2,
        num_kv_heads,
        BLOCK_SIZE,
        run_bytes // BLOCK_SIZE // pool_dtype.itemsize,
    )
    pool = torch.zeros(sizes, dtype=pool_dtype)
    pool.view(torch.float32).copy_(randn(*pool.view(torch.float32).shape, seed=6))
    place = StatePlace(LAYER, first * spaced_floats(shape, num_kv_heads))
    case = Case(shape, weights_of(shape, dtype), place, pool, table)
    if isinstance(shape, DeltaNetShape) and shape.num_key_heads < num_kv_heads:
        for blocks in case.inputs([Part(1)] * num_seqs).tables.flatten(0, 1).long():
            write_heads(pool, place, blocks, shape, *read_heads(pool, place, blocks, shape))  # alike in all
    return case


def assert_same_step(
    case: Case, kernel: Kernel, reference: Kernel, dtype: torch.dtype, parts: Sequence[Part]
) -> None:
    """The output and the states are close to the reference's, and nothing else in the pool changes. A row
    that is no sequence's follows, as in a captured step."""
    projected = case.projected(sum(part.num_tokens for part in parts) + 1, dtype)
    pool, expected_pool = case.pool.clone(), case.pool.clone()
    found = case.run(kernel, projected, pool, parts)
    expected = case.run(reference, projected, expected_pool, parts)
    assert found.dtype == dtype
    assert not found[-1].any()
    allowed = 2e-5 if dtype == torch.float32 else 2e-2
    assert (found - expected).abs().max() <= allowed * expected.abs().max() + 1e-30
    before, after, known = (of.view(torch.int32) for of in (case.pool, pool, expected_pool))
    assert torch.equal(after[known == before], before[known == before])
    states, known_states = pool.view(torch.float32), expected_pool.view(torch.float32)
    assert (states - known_states).abs().max() <= 2e-5 * known_states.abs().max()


def assert_same_bits_in_chunks(
    case: Case, kernel: Kernel, dtype: torch.dtype, source: int, length: int, cuts: Sequence[int]
) -> None:
    """A sequence at once, with a snapshot, and in chunks: output, state and snapshot are equal bit by bit."""
    projected, mark = case.projected(length, dtype), cuts[0]
    whole_pool, pool = case.pool.clone(), case.pool.clone()
    whole = case.run(kernel, projected, whole_pool, [Part(length, source, mark)])
    edges = sorted({0, length, *cuts})
    found, newest = [], source
    for start, end in itertools.pairwise(edges):
        part = Part(end - start, newest, end - start if end == mark else 0)
        found.append(case.run(kernel, projected[start:end], pool, [part]))
        newest = 0 if newest == NO_STATE else 1 - newest
    assert torch.equal(torch.cat(found), whole)
    tables = case.inputs([Part(1)]).tables[0].long()
    of_whole = 0 if source == NO_STATE else 1 - source
    for one, other in ((newest, of_whole), (2, 2)):
        pair = [
            read_state(of, case.place, tables[copy], case.shape)
            for of, copy in ((pool, one), (whole_pool, other))
        ]
        assert torch.equal(*pair)
