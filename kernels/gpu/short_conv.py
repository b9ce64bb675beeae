"""Short convolutions of gated inputs. Formulas, layout and contract: ../short_conv.py.

FLOPs: 2 (conv_size + 1) a channel and token. Bytes: b, c and x in and y out; earlier tokens' b and x come
from L2. One program a token and some channels: it computes again the inputs of the tokens before, so that no
program waits for another. Nothing here waits for the device, and grids depend on shapes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..short_conv import ShortConvShape, ShortConvWeights
from ..state_shape import StatePlace
from ..states import StateInputs, check_states
from .states import IS_NEW, SEQS, first_of_run, sequence_of

CHANNELS_AT_ONCE = 256


def short_conv(
    projected: Tensor,
    pool: Tensor,
    place: StatePlace,
    shape: ShortConvShape,
    weights: ShortConvWeights,
    inputs: StateInputs,
) -> Tensor:
    """See ``interface.Kernels``."""
    num_tokens, (num_seqs, _, table) = len(projected), inputs.tables.shape
    states = pool.view(torch.float32)[:, place.layer]  # [num_blocks, planes, num_kv_heads, block_size, row]
    check_states(pool, place, shape, inputs)
    for tensor in (projected, weights.conv, weights.bias):
        assert tensor is None or tensor.is_contiguous()
    assert states.stride()[3:] == (states.shape[4], 1)
    assert projected.shape[1] == shape.width
    out = projected.new_zeros((num_tokens, shape.channels))
    block = min(CHANNELS_AT_ONCE, triton.next_power_of_2(shape.channels))
    _short_conv_kernel[(num_tokens, triton.cdiv(shape.channels, block))](
        projected, states, weights.conv, weights.conv if weights.bias is None else weights.bias, out,
        inputs.query_start_loc, inputs.tables, inputs.source, inputs.marks, *states.stride()[:3], num_seqs,
        CHANNELS=shape.channels, TAPS=shape.conv_size, HAS_BIAS=weights.bias is not None,
        NUM_KV=states.shape[2], TABLE=table, OFFSET=place.offset, PLANES=states.shape[1],
        RUN=states.shape[3] * states.shape[4], BLOCK=block, SEQS=SEQS, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_seqs"])
def _short_conv_kernel(
    projected, states, conv, bias, out, query_start_loc, tables, source, marks, stride_block, stride_plane,
    stride_head, num_seqs, CHANNELS: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_KV: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr, PLANES: tl.constexpr, RUN: tl.constexpr,
    BLOCK: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """A sequence's last token, and a marked one, write the inputs that are kept."""
    CHANNELS_OF_KV: tl.constexpr = CHANNELS // NUM_KV
    token = tl.program_id(0)
    seq = sequence_of(token, query_start_loc, source, num_seqs, SEQS)
    if seq >= 0:
        which = tl.load(source + seq)
        start = tl.load(query_start_loc + seq)
        is_last = token + 1 == tl.load(query_start_loc + seq + 1)
        is_marked = token + 1 == start + tl.load(marks + seq)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        real = channel < CHANNELS
        kv = channel // CHANNELS_OF_KV
        kept = OFFSET + channel % CHANNELS_OF_KV
        total = tl.zeros([BLOCK], tl.float32)
        if HAS_BIAS:
            total = tl.load(bias + channel, mask=real, other=0.0)
        for j in tl.static_range(TAPS):
            at = token - (TAPS - 1) + j
            row = projected + at.to(tl.int64) * (3 * CHANNELS) + channel
            here = real & (at >= start)
            b = tl.load(row, mask=here, other=0.0).to(tl.float32)
            x = b * tl.load(row + 2 * CHANNELS, mask=here, other=0.0).to(tl.float32)
            if j < TAPS - 1:
                before = kept + (at - start + TAPS - 1) * CHANNELS_OF_KV
                is_before = real & (at < start) & (which != IS_NEW)
                run = first_of_run(
                    states, tables, seq, tl.maximum(which, 0), kv, before // RUN, is_before, stride_block,
                    stride_plane, stride_head, TABLE, PLANES,
                )  # fmt: skip
                x += tl.load(run + before % RUN, mask=is_before, other=0.0)
            if j > 0:
                after = kept + (j - 1) * CHANNELS_OF_KV
                for copy in tl.static_range(2):
                    writes = real & (is_marked if copy else is_last)
                    run = first_of_run(
                        states, tables, seq, 2 if copy else tl.where(which == 0, 1, 0), kv, after // RUN,
                        writes, stride_block, stride_plane, stride_head, TABLE, PLANES,
                    )  # fmt: skip
                    tl.store(run + after % RUN, x, mask=writes)
            total += x * tl.load(conv + j * CHANNELS + channel, mask=real, other=0.0)
        row = projected + token.to(tl.int64) * (3 * CHANNELS) + channel
        y = tl.load(row + CHANNELS, mask=real, other=0.0).to(tl.float32) * total
        tl.store(out + token.to(tl.int64) * CHANNELS + channel, y.to(out.dtype.element_ty), mask=real)
