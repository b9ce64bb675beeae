"""Short convolutions of gated inputs (Hasani et al., LFM2 Technical Report, 2025), over a state that lies in
the blocks of the KV pool: the newest inputs of the convolution.

    s = b x;  y_t = c_t (bias + sum over j of conv_j s_(t - (conv_size - 1) + j))

by channel, with b, c and x of a layer's projection. All of it in float32; a token's sum is taken in the order
of the taps, so that a prompt's chunks give the same bits as the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .short_conv_shape import ShortConvShape as ShortConvShape
from .state_shape import NO_STATE, PADDING, StatePlace
from .states import StateInputs, read_state, write_state


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """conv  float32 [conv_size, channels]
    bias  float32 [channels], or None
    """

    conv: Tensor
    bias: Tensor | None = None


def short_conv(
    projected: Tensor,
    pool: Tensor,
    place: StatePlace,
    shape: ShortConvShape,
    weights: ShortConvWeights,
    inputs: StateInputs,
) -> Tensor:
    """The reference. ``projected`` [T, 3 channels]: b, c, x -> [T, channels] of the same type; reads and
    writes the states in ``pool``."""
    out = projected.new_zeros(len(projected), shape.channels)
    starts, past = inputs.query_start_loc.tolist(), shape.conv_size - 1
    for i, (source, mark) in enumerate(zip(inputs.source.tolist(), inputs.marks.tolist(), strict=True)):
        if source == PADDING:
            continue
        tables, tokens = inputs.tables[i].long(), slice(starts[i], starts[i + 1])
        b, c, x = projected[tokens].float().chunk(3, dim=1)
        newest = torch.zeros(past, shape.channels, device=pool.device)
        if source != NO_STATE:
            heads = read_state(pool, place, tables[source], shape).view(pool.shape[3], past, -1)
            newest = heads.movedim(0, 1).flatten(1)
        seen = torch.cat([newest, b * x])
        y = torch.zeros_like(c) if weights.bias is None else weights.bias.expand_as(c)
        for j in range(shape.conv_size):
            y = y + seen[j : j + len(c)] * weights.conv[j]
        out[tokens] = (c * y).to(out.dtype)
        ends = [(len(c), 1 if source == 0 else 0), *([(mark, 2)] if mark else [])]
        for end, copy in ends:
            heads = seen[end : end + past].view(past, pool.shape[3], -1).movedim(1, 0)
            write_state(pool, place, tables[copy], shape, heads.flatten(1))
    return out
