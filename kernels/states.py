"""The states of a step's sequences in the KV pool, for the kernels of layers that keep one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .state_shape import StatePlace, StateShape, used_floats


@dataclass(frozen=True, slots=True)
class StateInputs:
    """The places of the states of a step's sequences. Each sequence has a token or more, or it is padding.

    query_start_loc int32 [num_seqs + 1]
    tables          int32 [num_seqs, 3, blocks]  blocks of the pool: two copies of the state, and a snapshot
    source          int32 [num_seqs]             the copy that has the state before the step; the other gets
                                                 the one after it. NO_STATE: zeros, and copy 0 gets it.
                                                 PADDING: nothing is read or written, the output is zeros
    marks           int32 [num_seqs]             the snapshot gets the state after as many of the step's
                                                 tokens; 0: there is none
    """

    query_start_loc: Tensor
    tables: Tensor
    source: Tensor
    marks: Tensor


def check_states(pool: Tensor, place: StatePlace, shape: StateShape, inputs: StateInputs) -> None:
    """Assert that the tables hold this layer's state, and that kernels may read the inputs."""
    run_bytes = pool.shape[4] * pool.shape[5] * pool.itemsize
    room = inputs.tables.shape[2] * pool.shape[2] * used_floats(shape, run_bytes)
    assert place.offset + shape.of_head(pool.shape[3]).num_floats <= room
    assert place.offset % shape.row == 0
    for tensor in (inputs.query_start_loc, inputs.tables, inputs.source, inputs.marks):
        assert (tensor.dtype, tensor.is_contiguous()) == (torch.int32, True)


def read_state(pool: Tensor, place: StatePlace, blocks: Tensor, shape: StateShape) -> Tensor:
    """float32 [num_kv_heads, numbers of a head's part]. For references. ``blocks``: of a table."""
    num_floats = shape.of_head(pool.shape[3]).num_floats
    _, runs = _runs(pool, place, blocks, shape)
    return runs.flatten(1)[:, place.offset : place.offset + num_floats].clone()


def write_state(pool: Tensor, place: StatePlace, blocks: Tensor, shape: StateShape, state: Tensor) -> None:
    """``state``: as ``read_state`` returns it."""
    there, runs = _runs(pool, place, blocks, shape)
    floats = runs.flatten(1)
    floats[:, place.offset : place.offset + state.shape[1]] = state
    runs.copy_(floats.view_as(runs))
    pool[blocks, place.layer] = there.movedim(0, 2)


def _runs(pool: Tensor, place: StatePlace, blocks: Tensor, shape: StateShape) -> tuple[Tensor, Tensor]:
    """A copy of the layer's part of the blocks, [num_kv_heads, blocks, planes, block_size, numbers], and a
    view of the floats that hold states: [num_kv_heads, runs, floats]."""
    there = pool[blocks, place.layer].movedim(2, 0).contiguous()
    num_heads, num_blocks, planes = there.shape[:3]
    runs = there.view(torch.uint8).view(num_heads, num_blocks * planes, -1).view(torch.float32)
    return there, runs[:, :, : used_floats(shape, 4 * runs.shape[2])]
