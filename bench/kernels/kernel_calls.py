"""Calls of the GPU's kernels on memory that holds nothing, in the shapes of real models: to be compiled, not
run."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.delta_net import DeltaNetShape, DeltaNetWeights
from ...kernels.gpu.decode_attention import decode_attention
from ...kernels.gpu.decode_plan import plan_decode
from ...kernels.gpu.delta_net import delta_net
from ...kernels.gpu.elementwise import gate_mul
from ...kernels.gpu.exact_linear import ExactLinear, product_tile
from ...kernels.gpu.expert_tiles import ExpertTiles
from ...kernels.gpu.latent_attention import latent_attention
from ...kernels.gpu.low_rank import GpuLowRank
from ...kernels.gpu.mixture import grouped_product, route, weighted_sum
from ...kernels.gpu.norm import add_rms_norm
from ...kernels.gpu.prefill_attention import plan_prefill, prefill_attention
from ...kernels.gpu.quantised_experts import QuantisedExperts
from ...kernels.gpu.quantised_linear import QuantisedLinear, quantised_tile
from ...kernels.gpu.rope_store import rope_and_store
from ...kernels.gpu.sampling import SamplingRows, sample
from ...kernels.gpu.short_conv import short_conv
from ...kernels.gpu.step_inputs import advance
from ...kernels.interface import AttentionInputs, RopeInputs
from ...kernels.mixture_shape import MixtureShape
from ...kernels.short_conv import ShortConvShape, ShortConvWeights
from ...kernels.state_shape import StatePlace, num_state_blocks
from ...kernels.states import StateInputs
from . import sm90
from .attention_variants import Attention
from .gate_up import GateUpTile, gate_up
from .kernel_figures import QUANTISED_FIGURE
from .kernel_inputs import QUANTISED, quantised_weight

BFLOAT16, FLOAT16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
NUM_SEQS, MANY_SEQS, MAX_BLOCKS = 64, 65, 64


def empty(*shape: int, dtype: torch.dtype = BFLOAT16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def attention(variant: Attention, num_kv_heads: int = 8, num_seqs: int = NUM_SEQS) -> None:
    """Its plan and itself."""
    head_dim, group, block_size = variant.head_dim, variant.group, variant.block_size
    num_heads = group * num_kv_heads
    pool, scales = empty_pool(head_dim, num_kv_heads, block_size, variant.cache_dtype)
    starts, lens, tables = (
        empty(*shape, dtype=torch.int32) for shape in ((num_seqs + 1,), (num_seqs,), (num_seqs, MAX_BLOCKS))
    )
    window = 1000 if variant.window else None
    sinks = empty(num_heads, dtype=torch.float32) if variant.sinks else None
    inputs = AttentionInputs(starts, lens, tables, 0.1, window, variant.softcap, scales, sinks=sinks)
    num_tokens = num_seqs if variant.family == "decode" else 1024
    q = empty(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=variant.dtype)[:, :num_heads]
    out = empty(num_tokens, num_heads * head_dim, dtype=variant.dtype)
    if variant.family == "decode":
        plan = plan_decode(inputs, num_heads, num_kv_heads, head_dim, block_size, one_group=variant.exact)
        decode_attention(out, q, pool, 1, inputs, plan, 3 * sm90.NUM_SMS, variant.tile)
    else:
        tiles = plan_prefill(inputs, num_tokens, group, variant.tile, singles=True)
        prefill_attention(out, q, pool, 1, inputs, tiles, variant.exact)


def norm(hidden: int, dtype: torch.dtype = BFLOAT16) -> None:
    x, residual = (empty(8, hidden, dtype=dtype) for _ in range(2))
    add_rms_norm(x, residual, empty(hidden, dtype=dtype), 1e-5)


def rope(
    head_dim: int, cache_dtype: torch.dtype = BFLOAT16, dtype: torch.dtype = BFLOAT16, norm: int = 1,
    heads: int = 32, kv_heads: int = 8,
) -> None:  # fmt: skip
    """``norm``: dimensions of the norms' weights; 0: there are none."""
    pool, scales = empty_pool(head_dim, kv_heads, 64, cache_dtype)
    positions, slots, cos_sin = (
        empty(8, dtype=torch.int32),
        empty(8, dtype=torch.int64),
        empty(64, head_dim, dtype=torch.float32),
    )
    q, k = (empty(*[n] * (norm - 1), head_dim, dtype=dtype) if norm else None for n in (heads, kv_heads))
    inputs = RopeInputs(positions, slots, cos_sin, heads, kv_heads, head_dim, q, k, 1e-6, scales)
    rope_and_store(empty(8, (heads + 2 * kv_heads) * head_dim, dtype=dtype), pool, 1, inputs)


def exact_linear(
    num_tokens: int, in_features: int = 4096, dtype: torch.dtype = BFLOAT16, bias: bool = False,
    out_features: int = 6144,
) -> None:  # fmt: skip
    weight = empty(out_features, in_features, dtype=dtype)
    ExactLinear(weight, empty(out_features, dtype=dtype) if bias else None)(
        empty(num_tokens, in_features, dtype=dtype)
    )


def low_rank(
    in_features: int, out_features: int, max_rank: int, dtype: torch.dtype = BFLOAT16, num_tokens: int = 8
) -> None:
    updates = GpuLowRank(in_features, out_features, max_rank, 1, dtype, torch.device("cpu"))
    out, x = empty(num_tokens, out_features, dtype=dtype), empty(num_tokens, in_features, dtype=dtype)
    updates.add(out, x, empty(num_tokens, dtype=torch.int32))


def gated_delta_net(
    num_seqs: int, num_tokens: int, dtype: torch.dtype = BFLOAT16, mamba: bool = False
) -> None:
    """Qwen3-Next's heads, or Granite 4.0 H Tiny's."""
    shape, block_size, head_dim = DeltaNetShape(16, 32, 128, 128, 4), 32, 256
    if mamba:
        shape = DeltaNetShape(1, 48, 128, 64, 4, delta_rule=False)
    count = num_state_blocks(shape, 2, block_size * head_dim * dtype.itemsize)
    decay, dt = (empty(shape.num_value_heads, dtype=torch.float32) for _ in range(2))
    conv, norm = empty(shape.channels, shape.conv_size, dtype=dtype), empty(shape.value_dim)
    weights = DeltaNetWeights(conv, decay, dt, norm, 1e-6)
    if mamba:
        bias = empty(shape.channels, dtype=torch.float32)
        weights = DeltaNetWeights(conv, decay, dt, conv_bias=bias, skip=dt)
    starts, tables = (empty(*of, dtype=torch.int32) for of in ((num_seqs + 1,), (num_seqs, 3, count)))
    source, marks = (empty(num_seqs, dtype=torch.int32) for _ in range(2))
    inputs = StateInputs(starts, tables, source, marks)
    pool = empty(4, 1, 2, 2, block_size, head_dim, dtype=dtype)
    delta_net(empty(num_tokens, shape.width, dtype=dtype), pool, StatePlace(0, 0), shape, weights, inputs)


def gated_short_conv(num_seqs: int, num_tokens: int, bias: bool = False) -> None:
    """LFM2's channels."""
    shape, count = ShortConvShape(2048, 3), 1
    conv, of = (empty(*sizes, dtype=torch.float32) for sizes in ((3, 2048), (2048,)))
    starts, tables = (empty(*of, dtype=torch.int32) for of in ((num_seqs + 1,), (num_seqs, 3, count)))
    source, marks = (empty(num_seqs, dtype=torch.int32) for _ in range(2))
    inputs, pool = StateInputs(starts, tables, source, marks), empty(4, 1, 2, 8, 16, 64)
    weights = ShortConvWeights(conv, of if bias else None)
    short_conv(empty(num_tokens, shape.width), pool, StatePlace(0, 512), shape, weights, inputs)


def gate_and_up(tile: GateUpTile) -> None:
    gate_up(empty(8, 4096), empty(2 * 1024, 4096), tile)


def latent(num_tokens: int, dtype: torch.dtype = BFLOAT16, heads: int = 128) -> None:
    """Attention with the sizes of DeepSeek-V3, for 64 sequences; of decode rows with log-sum-exps."""
    starts, lens, tables = (
        empty(*shape, dtype=torch.int32) for shape in ((NUM_SEQS + 1,), (NUM_SEQS,), (NUM_SEQS, MAX_BLOCKS))
    )
    q, pool = empty(num_tokens, heads, 576, dtype=dtype), empty(4, 2, 1, 1, 64, 576, dtype=dtype)
    lse = empty(num_tokens, heads, dtype=torch.float32) if num_tokens == NUM_SEQS else None
    latent_attention(q, pool, 1, AttentionInputs(starts, lens, tables, 0.1), sm90.NUM_SMS, False, lse)


def latent_rope() -> None:
    ints, slots = empty(8, dtype=torch.int32), empty(8, dtype=torch.int64)
    inputs = RopeInputs(ints, slots, empty(64, 576, dtype=torch.float32), 128, 1, 576)
    rope_and_store(empty(8, 129 * 576), empty(4, 2, 1, 1, 64, 576), 1, inputs)


def quantised_linear(form: str, num_tokens: int, dtype: torch.dtype = BFLOAT16) -> None:
    """And, of inputs that are rounded, their rounding."""
    weight = quantised_weight(512, 4096, **QUANTISED[form])
    QuantisedLinear(weight, empty(512, dtype=dtype), num_sms=sm90.NUM_SMS)(
        empty(num_tokens, 4096, dtype=dtype)
    )


def measured_quantised(form: str) -> None:
    rows, n, k = QUANTISED_FIGURE
    QuantisedLinear(quantised_weight(n, k, **QUANTISED[form]), None)(empty(rows, k))


def mixture(num_tokens: int, dtype: torch.dtype = BFLOAT16) -> None:
    """Its routes, both products and its sum; as in Qwen3-30B-A3B."""
    shape = MixtureShape(128, 8, 2048, 768, normalized=True, activation="silu")
    logits, x = empty(num_tokens, 128, dtype=dtype), empty(num_tokens, 2048, dtype=dtype)
    experts, weights = route(logits, shape)
    tile = product_tile(experts.numel())
    ints = empty(129, dtype=torch.int32)
    tiles = ExpertTiles(empty(8 * num_tokens, dtype=torch.int64), ints, ints[1:].clone())
    gate_up = grouped_product(x, empty(128, 1536, 2048, dtype=dtype), None, tiles, tile, 8, sorted_rows=False)
    down = empty(128, 2048, 768, dtype=dtype)
    parts = grouped_product(gate_up[:, :768].clone(), down, None, tiles, tile, 8, sorted_rows=True)
    weighted_sum(parts, weights, None, logits)


def part_of_mixture(num_tokens: int) -> None:
    """What else runs where 32 of these experts are held."""
    shape = MixtureShape(128, 8, 2048, 768, normalized=True, activation="silu", own=range(32, 64))
    logits, rows = empty(num_tokens, 128), 8 * num_tokens
    experts, weights = route(logits, shape)
    gate_mul(empty(rows, 1536), "silu", empty(1, dtype=torch.int32))
    weighted_sum(empty(rows, 2048), weights, None, logits, held=(experts, 32))


def quantised_experts(form: str, num_tokens: int, dtype: torch.dtype = BFLOAT16) -> None:
    """Both products of 32 experts, 4 a token."""
    count = 4 * num_tokens
    ints, tile = empty(33, dtype=torch.int32), quantised_tile(count, experts=True)
    tiles = ExpertTiles(empty(count, dtype=torch.int64), ints, ints[1:].clone())
    for x_rows, last in ((num_tokens, False), (count, True)):
        matrix = quantised_weight(64, 2880 if last else 4096, **QUANTISED[form])
        experts = QuantisedExperts.of([matrix] * 32, empty(32, 64, dtype=dtype))
        assert experts is not None
        experts(empty(x_rows, matrix.in_features, dtype=dtype), tiles, tile, 4, sorted_rows=last)


def sampling(n: int = 8, vocab_size: int = 151936, edited: bool = True, filtered: bool = True) -> None:
    ints, floats = empty(n, dtype=torch.int32), empty(n, dtype=torch.float32)
    rows = SamplingRows(
        empty(n, dtype=torch.int64), ints, floats, ints, floats, floats, floats, floats, floats, ints,
        empty(n, vocab_size, dtype=torch.int32), empty(n + 1, dtype=torch.int32), ints, ints, floats,
        edited=edited, filtered=filtered,
    )  # fmt: skip
    sample(empty(n, vocab_size, dtype=torch.float32), rows)


def step_inputs(num_rows: int, max_blocks: int = 2049) -> None:
    words, slots = empty(num_rows, dtype=torch.int32), empty(num_rows, dtype=torch.int64)
    packed = empty(4 + 3 * num_rows + 2 * num_rows * max_blocks, dtype=torch.int32)
    tables = empty(num_rows, max_blocks, dtype=torch.int32)
    advance(packed, words, words, words, words, words, slots, tables, num_rows, 64)


def block_bytes(num_bytes: int = 1 << 20) -> tuple[Tensor, Tensor]:
    return empty(4, num_bytes, dtype=torch.uint8), empty(2, dtype=torch.int64)


def empty_pool(
    head_dim: int, num_kv_heads: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    scales = empty(2, 2, num_kv_heads, dtype=torch.float32) if dtype == FP8 else None
    return empty(4, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype), scales
