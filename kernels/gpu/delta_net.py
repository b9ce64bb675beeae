"""Gated delta nets and Mamba-2: convolution and gates, the recurrence over a state in KV blocks, the gated
norm (Mamba-2: the gate). Formulas, layout and contract: ../delta_net.py.

    kv = S' k,  sq = S' q,  delta = beta (v - g kv),  o = g sq + (k' q) delta,  S = g S + k delta'

Mamba-2's rule has no kv, and adds skip v to o.

FLOPs: 8 Dk Dv a token and value head. Bytes: each value head's state once in and once out a sequence; a
token's row of the projection, and three times as much between the kernels. Three kernels: one program a token
and head; one a sequence, value head and slice of the state's columns, which stays in registers while the
tokens go by; one a token and value head. Nothing here waits for the device, and grids depend on shapes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..delta_net import L2_EPS, DeltaNetShape, DeltaNetWeights
from ..state_shape import StatePlace
from ..states import StateInputs, check_states
from .states import IS_NEW, IS_PADDING, SEQS, first_of_run, sequence_of

COLUMNS = 16  # of a state in one program, which is one warp: sums over rows need no barrier

_L2_EPS = tl.constexpr(L2_EPS)


def delta_net(
    projected: Tensor,
    pool: Tensor,
    place: StatePlace,
    shape: DeltaNetShape,
    weights: DeltaNetWeights,
    inputs: StateInputs,
) -> Tensor:
    """See ``interface.Kernels``."""
    num_tokens, (num_seqs, _, table) = len(projected), inputs.tables.shape
    states = pool.view(torch.float32)[:, place.layer]  # [num_blocks, planes, num_kv_heads, block_size, row]
    block_size, row = states.shape[3:]
    norm = weights.skip if weights.norm is None else weights.norm
    assert norm is not None
    for tensor in (projected, weights.conv, norm):
        assert tensor.is_contiguous()
    assert states.stride()[3:] == (row, 1)
    assert projected.shape[1] == shape.width
    check_states(pool, place, shape, inputs)
    heads, device = shape.num_value_heads, projected.device
    mixed = torch.empty((num_tokens, shape.channels), dtype=torch.float32, device=device)
    gates = torch.empty((num_tokens, heads, 2), dtype=torch.float32, device=device)
    unnormed = torch.empty((num_tokens, heads, shape.value_dim), dtype=torch.float32, device=device)
    out = projected.new_zeros((num_tokens, heads * shape.value_dim))
    of_state = inputs.query_start_loc, inputs.tables, inputs.source, inputs.marks, *states.stride()[:3]
    sizes = {
        "KEYS": shape.key_dim, "VALUES": shape.value_dim, "NUM_KEYS": shape.num_key_heads,
        "NUM_VALUES": heads, "DELTA": shape.delta_rule,
    }  # fmt: skip
    layout = {
        "NUM_KV": states.shape[2], "TABLE": table, "OFFSET": place.offset, "PLANES": states.shape[1],
        "RUN": block_size * row // shape.value_dim * shape.value_dim, "num_warps": 1,
    }  # fmt: skip
    dims = triton.next_power_of_2(shape.value_dim)
    _mix_kernel[(num_tokens, 2 * shape.num_key_heads + heads)](
        projected, states, weights.conv, weights.conv_bias, weights.decay, weights.dt, mixed, gates,
        *of_state, num_seqs, weights.beta_scale, TAPS=shape.conv_size,
        DIMS=max(dims, triton.next_power_of_2(shape.key_dim)), SEQS=SEQS, **sizes, **layout,
    )  # fmt: skip
    columns = min(COLUMNS, dims)
    _step_kernel[(num_seqs, heads, triton.cdiv(shape.value_dim, columns))](
        states, mixed, gates, weights.skip, unnormed, *of_state, ROWS=triton.next_power_of_2(shape.key_dim),
        COLUMNS=columns, **sizes, **layout,
    )  # fmt: skip
    _norm_kernel[(num_tokens, heads)](
        projected, unnormed, norm, out, inputs.query_start_loc, inputs.source, num_seqs, weights.eps,
        DIMS=dims, SEQS=SEQS, **sizes, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_seqs"])
def _mix_kernel(
    projected, states, conv, bias, decay, dt, mixed, gates, query_start_loc, tables, source, marks,
    stride_block, stride_plane, stride_head, num_seqs, beta_scale, KEYS: tl.constexpr, VALUES: tl.constexpr,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DELTA: tl.constexpr, NUM_KV: tl.constexpr,
    TABLE: tl.constexpr, OFFSET: tl.constexpr, PLANES: tl.constexpr, RUN: tl.constexpr, TAPS: tl.constexpr,
    DIMS: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """One head of q, k or v of a token. A sequence's last token writes the inputs that are kept: those of a
    key head to each key-value head that has it."""
    KEYS_OF_KV: tl.constexpr = max(1, NUM_KEYS // NUM_KV)
    WITH_SAME: tl.constexpr = max(1, NUM_KV // NUM_KEYS)
    VALUES_OF_KV: tl.constexpr = NUM_VALUES // NUM_KV
    KEPT: tl.constexpr = 2 * KEYS_OF_KV * KEYS + VALUES_OF_KV * VALUES
    CHANNELS: tl.constexpr = 2 * NUM_KEYS * KEYS + NUM_VALUES * VALUES
    WIDTH: tl.constexpr = CHANNELS + NUM_VALUES * (VALUES + 1 + DELTA)
    token = tl.program_id(0)
    head = tl.program_id(1)
    seq = sequence_of(token, query_start_loc, source, num_seqs, SEQS)
    if seq >= 0:
        which = tl.load(source + seq)
        start = tl.load(query_start_loc + seq)
        is_last = token + 1 == tl.load(query_start_loc + seq + 1)
        is_marked = token + 1 == start + tl.load(marks + seq)
        is_key = head < 2 * NUM_KEYS
        key = head % NUM_KEYS
        value = tl.maximum(head - 2 * NUM_KEYS, 0)
        kv = tl.where(is_key, key // KEYS_OF_KV * WITH_SAME, value // VALUES_OF_KV)
        kept_key = (head // NUM_KEYS * KEYS_OF_KV + key % KEYS_OF_KV) * KEYS
        kept_value = 2 * KEYS_OF_KV * KEYS + value % VALUES_OF_KV * VALUES
        lane = tl.arange(0, DIMS)
        real = lane < tl.where(is_key, KEYS, VALUES)
        there = tl.where(is_key, head * KEYS, 2 * NUM_KEYS * KEYS + value * VALUES) + lane
        kept = OFFSET + VALUES_OF_KV * KEYS * VALUES + tl.where(is_key, kept_key, kept_value) + lane
        total = tl.zeros([DIMS], tl.float32)
        if bias is not None:
            total += tl.load(bias + there, mask=real, other=0.0)
        for j in tl.static_range(TAPS):
            at = token - (TAPS - 1) + j
            x = tl.load(projected + at.to(tl.int64) * WIDTH + there, mask=real & (at >= start), other=0.0).to(
                tl.float32
            )
            if j < TAPS - 1:
                before = kept + (at - start + TAPS - 1) * KEPT
                is_before = real & (at < start) & (which != IS_NEW)
                run = first_of_run(
                    states, tables, seq, tl.maximum(which, 0), kv, before // RUN, is_before, stride_block,
                    stride_plane, stride_head, TABLE, PLANES,
                )  # fmt: skip
                x += tl.load(run + before % RUN, mask=is_before, other=0.0)
            if j > 0:
                after = kept + (j - 1) * KEPT
                for copy in tl.static_range(2):
                    for of in tl.static_range(WITH_SAME):
                        writes = real & (is_marked if copy else is_last) & (is_key | (of == 0))
                        run = first_of_run(
                            states, tables, seq, 2 if copy else tl.where(which == 0, 1, 0), kv + of,
                            after // RUN, writes, stride_block, stride_plane, stride_head, TABLE, PLANES,
                        )  # fmt: skip
                        tl.store(run + after % RUN, x, mask=writes)
            total += x * tl.load(conv + there * TAPS + j, mask=real, other=0.0).to(tl.float32)
        y = total * tl.sigmoid(total)
        if DELTA:
            scale = 1.0 / tl.sqrt_rn(tl.sum(y * y, 0) + _L2_EPS)
            y *= tl.where(is_key, tl.where(head < NUM_KEYS, scale * KEYS**-0.5, scale), 1.0)
        tl.store(mixed + token.to(tl.int64) * CHANNELS + there, y, mask=real)
        if head >= 2 * NUM_KEYS:
            at_gates = projected + token.to(tl.int64) * WIDTH + CHANNELS + NUM_VALUES * VALUES + value
            b = tl.load(at_gates).to(tl.float32)
            a = tl.load(at_gates + NUM_VALUES * DELTA).to(tl.float32) + tl.load(dt + value)
            step = _softplus(a)
            to = gates + (token.to(tl.int64) * NUM_VALUES + value) * 2
            tl.store(to, tl.exp(-tl.load(decay + value) * step))
            tl.store(to + 1, beta_scale * tl.sigmoid(b) if DELTA else step)


@triton.jit
def _softplus(x):
    u = tl.exp(tl.minimum(x, 20.0))
    wide = 1.0 + u  # log1p(u) = log(wide) u / (wide - 1): exact where `wide` rounds (Kahan)
    log1p = tl.where(wide == 1.0, u, tl.log(wide) * (u / tl.where(wide == 1.0, 1.0, wide - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def _token(
    mixed, gates, there, key, head, rows, columns, KEYS: tl.constexpr, VALUES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
):  # fmt: skip
    """q and k [ROWS], v [COLUMNS], decay, beta of the token at ``mixed`` and ``gates``, or zeros."""
    q = tl.load(mixed + key * KEYS + rows, mask=there & (rows < KEYS), other=0.0)
    k = tl.load(mixed + (NUM_KEYS + key) * KEYS + rows, mask=there & (rows < KEYS), other=0.0)
    of_values = mixed + 2 * NUM_KEYS * KEYS + head * VALUES
    v = tl.load(of_values + columns, mask=there & (columns < VALUES), other=0.0)
    decay = tl.load(gates + 2 * head, mask=there, other=0.0)
    beta = tl.load(gates + 2 * head + 1, mask=there, other=0.0)
    return q, k, v, decay, beta


@triton.jit
def _step_kernel(
    states, mixed, gates, skip, out, query_start_loc, tables, source, marks, stride_block, stride_plane,
    stride_head, KEYS: tl.constexpr, VALUES: tl.constexpr, NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr,
    DELTA: tl.constexpr, NUM_KV: tl.constexpr, TABLE: tl.constexpr, OFFSET: tl.constexpr,
    PLANES: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one value head's state, for all tokens of a sequence, one after the other."""
    VALUES_OF_KV: tl.constexpr = NUM_VALUES // NUM_KV
    CHANNELS: tl.constexpr = 2 * NUM_KEYS * KEYS + NUM_VALUES * VALUES
    seq = tl.program_id(0)
    head = tl.program_id(1)
    which = tl.load(source + seq)
    if which != IS_PADDING:
        start = tl.load(query_start_loc + seq)
        end = tl.load(query_start_loc + seq + 1)
        marked = start + tl.load(marks + seq)
        key = head // (NUM_VALUES // NUM_KEYS)
        kv = head // VALUES_OF_KV
        rows = tl.arange(0, ROWS)
        columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        real = (rows < KEYS)[:, None] & (columns < VALUES)[None, :]
        in_runs = OFFSET + (head % VALUES_OF_KV * KEYS + rows) * VALUES
        run = in_runs // RUN
        within = (in_runs % RUN)[:, None] + columns[None, :]
        before = first_of_run(
            states, tables, seq, tl.maximum(which, 0), kv, run, (rows < KEYS) & (which >= 0), stride_block,
            stride_plane, stride_head, TABLE, PLANES,
        )  # fmt: skip
        state = tl.load(before[:, None] + within, mask=real & (which >= 0), other=0.0)
        snapshot = first_of_run(
            states, tables, seq, 2, kv, run, (rows < KEYS) & (marked > start), stride_block, stride_plane,
            stride_head, TABLE, PLANES,
        )  # fmt: skip
        first = start.to(tl.int64)
        mixed += first * CHANNELS
        gates += first * (2 * NUM_VALUES)
        out += (first * NUM_VALUES + head) * VALUES
        q, k, v, decay, beta = _token(
            mixed, gates, start < end, key, head, rows, columns, KEYS, VALUES, NUM_KEYS
        )
        for t in range(start, end):
            mixed += CHANNELS
            gates += 2 * NUM_VALUES
            # asked for now, so that the chain of the states does not wait for memory
            next_q, next_k, next_v, next_decay, next_beta = _token(
                mixed, gates, t + 1 < end, key, head, rows, columns, KEYS, VALUES, NUM_KEYS
            )
            of_q = tl.sum(state * q[:, None], 0)
            old = tl.sum(state * k[:, None], 0) * decay if DELTA else 0.0
            delta = (v - old) * beta
            o = of_q * decay + delta * tl.sum(k * q, 0)
            if not DELTA:
                o += tl.load(skip + head) * v
            tl.store(out + columns, o, mask=columns < VALUES)
            out += NUM_VALUES * VALUES
            state = state * decay + k[:, None] * delta[None, :]
            if t + 1 == marked:
                tl.store(snapshot[:, None] + within, state, mask=real)
            q, k, v, decay, beta = next_q, next_k, next_v, next_decay, next_beta
        after = first_of_run(
            states, tables, seq, tl.where(which == 0, 1, 0), kv, run, rows < KEYS, stride_block,
            stride_plane, stride_head, TABLE, PLANES,
        )  # fmt: skip
        tl.store(after[:, None] + within, state, mask=real)


@triton.jit(do_not_specialize=["num_seqs"])
def _norm_kernel(
    projected, unnormed, norm, out, query_start_loc, source, num_seqs, eps, KEYS: tl.constexpr,
    VALUES: tl.constexpr, NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, DELTA: tl.constexpr,
    DIMS: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    CHANNELS: tl.constexpr = 2 * NUM_KEYS * KEYS + NUM_VALUES * VALUES
    WIDTH: tl.constexpr = CHANNELS + NUM_VALUES * (VALUES + 1 + DELTA)
    token = tl.program_id(0)
    head = tl.program_id(1)
    if sequence_of(token, query_start_loc, source, num_seqs, SEQS) >= 0:
        lane = tl.arange(0, DIMS)
        real = lane < VALUES
        at = (token.to(tl.int64) * NUM_VALUES + head) * VALUES + lane
        x = tl.load(unnormed + at, mask=real, other=0.0)
        z = tl.load(
            projected + token.to(tl.int64) * WIDTH + CHANNELS + head * VALUES + lane, mask=real, other=0.0
        ).to(tl.float32)
        y = x * (z * tl.sigmoid(z))
        if DELTA:
            x *= 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / VALUES + eps)
            x = x.to(out.dtype.element_ty).to(tl.float32)
            y = tl.load(norm + lane, mask=real, other=0.0).to(tl.float32) * x * (z * tl.sigmoid(z))
        tl.store(out + at, y.to(out.dtype.element_ty), mask=real)
