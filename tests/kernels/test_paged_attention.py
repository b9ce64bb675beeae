"""The GPU's attention kernels, in Triton's interpreter, compute what float64 does, and the same bits however
the work is cut up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.kernel_inputs import LAYER, AttentionCase, attention_case, relative_error
from splitserve.kernels.gpu import decode_plan
from splitserve.kernels.gpu.attention_tiles import TileShape
from splitserve.kernels.gpu.decode_attention import decode_attention, decode_tile
from splitserve.kernels.gpu.decode_plan import MAX_PARTIALS, plan_decode
from splitserve.kernels.gpu.prefill_attention import plan_prefill, prefill_attention
from splitserve.kernels.interface import AttentionInputs

triton_interpreter.install()
pytestmark = pytest.mark.usefixtures("guarded_memory")

DTYPES = st.sampled_from([torch.bfloat16, torch.float16])
SOFTCAPS = st.sampled_from([0.0, 0.0, 0.5])
WINDOWS = st.none() | st.integers(1, 300)
SMALL = TileShape(16, 32, 4, 3)
ALLOWED = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
few = settings(
    max_examples=7,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def decode(
    case: AttentionCase,
    rows: slice = slice(None),
    max_partials: int = MAX_PARTIALS,
    programs: int = 3,
    tile: TileShape | None = None,
    one_group: bool = False,
) -> Tensor:
    q, pool = case.q[rows], case.pool
    num_heads, head_dim = q.shape[1:]
    starts = torch.arange(len(q) + 1, dtype=torch.int32)
    lens, tables = case.inputs.seq_lens[rows], case.inputs.block_tables[rows]
    inputs = replace(case.inputs, query_start_loc=starts, seq_lens=lens, block_tables=tables)
    sizes = num_heads, pool.shape[3], head_dim, pool.shape[4]
    plan = plan_decode(inputs, *sizes, max_partials, one_group)
    tile = tile or decode_tile(head_dim, num_heads // pool.shape[3])
    outs = [torch.empty((len(q), num_heads * head_dim), dtype=q.dtype) for _ in "ab"]
    for out in outs:  # two layers: the second one's counters begin at zero
        decode_attention(out, q, pool, LAYER, inputs, plan, programs, tile)
    assert torch.equal(*outs)
    return outs[0]


def prefill(case: AttentionCase, tile: TileShape = SMALL, split_folds: bool = False) -> Tensor:
    plan = plan_prefill(case.inputs, len(case.q), case.q.shape[1] // case.pool.shape[3], tile, singles=True)
    out = torch.empty((len(case.q), case.q.shape[1] * case.q.shape[2]), dtype=case.q.dtype)
    prefill_attention(out, case.q, case.pool, LAYER, case.inputs, plan, split_folds)
    return out


@few
@given(
    lengths=st.lists(st.integers(1, 60) | st.integers(200, 600), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 2), (4, 1), (3, 2), (17, 1)]),
    head_dim=st.sampled_from([64, 96, 16]),
    block_size=st.sampled_from([16, 64, 24]),
    dtype=DTYPES,
    window=WINDOWS,
    softcap=SOFTCAPS,
    sinks=st.booleans(),
    programs=st.integers(1, 5),
)
def test_decode(
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float,
    sinks: bool,
    programs: int,
) -> None:
    case = attention_case(
        lengths, [1] * len(lengths), group=heads[0], num_kv_heads=heads[1], head_dim=head_dim,
        block_size=block_size, dtype=dtype, window=window,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip
    assert relative_error(decode(case, programs=programs), case.exact) < ALLOWED[dtype]


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, torch.float32), (128, torch.bfloat16), (256, torch.float16), (512, torch.bfloat16)],
)
def test_decode_of_each_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    case = attention_case([5, 270], [1, 1], head_dim=head_dim, block_size=64, dtype=dtype)
    assert relative_error(decode(case), case.exact) < ALLOWED[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_fp8_cache(dtype: torch.dtype) -> None:
    case = attention_case([70, 300], [1, 1], block_size=64, dtype=dtype, fp8=True)
    assert relative_error(decode(case), case.exact) < ALLOWED[dtype]
    case = attention_case([70, 80], [70, 5], block_size=64, dtype=dtype, fp8=True)
    assert relative_error(prefill(case), case.exact) < ALLOWED[dtype]


def test_a_decode_row_depends_on_nothing_but_its_own_sequence() -> None:
    """Neither on the batch, nor on the number of programs, nor on whether its partial results found room."""
    case = attention_case([700, 3, 520, 256], [1] * 4, num_kv_heads=1)
    together = decode(case)
    for row in (0, 1, 2):
        assert torch.equal(decode(case, slice(row, row + 1)), together[row : row + 1])
    assert torch.equal(decode(case, programs=7), together)
    for room in (0, 3):
        assert torch.equal(decode(case, max_partials=room), together)


def test_long_contexts_are_folded_in_groups_at_absolute_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the batch, the number of programs and the room for partial results, and whether groups are
    items; a window begins within a group."""
    monkeypatch.setattr(decode_plan, "GROUP_SPLITS", 2)
    for window in (None, 600):
        case = attention_case([1290, 300], [1, 1], num_kv_heads=1, window=window)
        together = decode(case)
        assert relative_error(together, case.exact) < ALLOWED[torch.bfloat16]
        assert torch.equal(decode(case, slice(0, 1), programs=1), together[:1])
        assert torch.equal(decode(case, max_partials=0), together)
        with monkeypatch.context() as few:
            few.setattr(decode_plan, "MANY_ITEMS", 1)
            assert torch.equal(decode(case), together)


def test_a_float8_cache_gives_what_the_same_values_in_float16_give() -> None:
    case = attention_case([70, 300], [1, 1], head_dim=128, block_size=64, dtype=torch.float16, fp8=True)
    ones = replace(case.inputs, kv_scales=torch.ones_like(case.inputs.kv_scales))
    narrow = replace(case, inputs=ones)
    wide = AttentionCase(case.q, case.pool.half(), replace(ones, kv_scales=None), case.exact)
    assert relative_error(decode(narrow), decode(wide).double()) < 1e-6
    bfloat16 = replace(narrow, q=case.q.bfloat16())
    assert relative_error(decode(bfloat16), decode(narrow).double()) < 0.02
    assert decode(replace(bfloat16, q=bfloat16.q * 1e6)).isfinite().all(), "beyond the range of float16"


def test_a_padding_row_is_zero() -> None:
    case = attention_case([40, 0, 300, 0], [1] * 4)
    out = decode(case)
    assert not out[1].any()
    assert not out[3].any()
    assert relative_error(out[[0, 2]], case.exact[[0, 2]]) < ALLOWED[torch.bfloat16]


@few
@given(
    chunks=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 25)), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 2), (4, 1), (3, 2), (7, 1)]),
    head_dim=st.sampled_from([64, 96, 16]),
    block_size=st.sampled_from([16, 64, 24]),
    dtype=DTYPES,
    window=st.none() | st.integers(1, 70),
    softcap=SOFTCAPS,
    sinks=st.booleans(),
    split_folds=st.booleans(),
)
def test_prefill(
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float,
    sinks: bool,
    split_folds: bool,
) -> None:
    """Chunks (cached tokens, new tokens) of several sequences in one batch."""
    case = attention_case(
        [cached + new for cached, new in chunks], [new for _, new in chunks], group=heads[0],
        num_kv_heads=heads[1], head_dim=head_dim, block_size=block_size, dtype=dtype, window=window,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip
    assert relative_error(prefill(case, split_folds=split_folds), case.exact) < ALLOWED[dtype]


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(128, torch.float32), (128, torch.bfloat16), (256, torch.float16), (512, torch.bfloat16)],
)
def test_prefill_of_each_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    case = attention_case([45, 70], [45, 3], head_dim=head_dim, block_size=64, dtype=dtype)
    assert relative_error(prefill(case, TileShape(32, 32, 4, 3)), case.exact) < ALLOWED[dtype]


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("block_size", [16, 64])
def test_prefill_in_tiles_of_several_blocks(block_size: int, window: int | None) -> None:
    """A window's beginning and the diagonal, in smaller tiles, lie within a tile of the middle."""
    case = attention_case([330, 90], [40, 90], block_size=block_size, window=window)
    assert relative_error(prefill(case, TileShape(32, 128, 4, 2)), case.exact) < ALLOWED[torch.bfloat16]


@given(
    chunks=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 90)), min_size=1, max_size=5),
    tokens=st.sampled_from([3, 8, 16]),
    singles=st.booleans(),
)
@settings(few, max_examples=15)
def test_the_longest_tiles_come_first(chunks: list[tuple[int, int]], tokens: int, singles: bool) -> None:
    starts = torch.tensor([0, *(new for _, new in chunks)]).cumsum(0).int()
    lens = torch.tensor([cached + new for cached, new in chunks], dtype=torch.int32)
    inputs = AttentionInputs(starts, lens, torch.zeros((len(lens), 1), dtype=torch.int32), 1.0)
    plan = plan_prefill(inputs, int(starts[-1]), 2, TileShape(2 * tokens, 32, 4, 3), singles)
    shortest = 1 if singles else 2
    expected = [
        (b, start) for b, (_, new) in enumerate(chunks) if new >= shortest for start in range(0, new, tokens)
    ]
    found = [tuple(tile) for tile in plan.tiles[: int(plan.num_tiles)].tolist()]
    assert sorted(found) == expected
    ends = [chunks[b][0] + start + tokens for b, start in found]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("window", [None, 75])
def test_prefilled_in_any_chunks_or_decoded_a_token_has_the_same_bits(window: int | None) -> None:
    case = attention_case([300], [70], num_kv_heads=1, window=window)  # the queries are the tokens 230 to 299
    whole = prefill(case, split_folds=True)
    for start, stop in ((0, 7), (7, 40)):
        lens = torch.tensor([230 + stop], dtype=torch.int32)
        starts = torch.tensor([0, stop - start], dtype=torch.int32)
        inputs = AttentionInputs(starts, lens, case.inputs.block_tables, case.inputs.scale, window)
        chunk = AttentionCase(case.q[start:stop], case.pool, inputs, case.exact)
        assert torch.equal(prefill(chunk, split_folds=True), whole[start:stop])
    rows = [0, 25, 26, 69]
    lens = torch.tensor(rows, dtype=torch.int32) + 231
    starts = torch.arange(len(rows) + 1, dtype=torch.int32)
    inputs = AttentionInputs(
        starts, lens, case.inputs.block_tables.expand(len(rows), -1), case.inputs.scale, window
    )
    steps = AttentionCase(case.q[rows], case.pool, inputs, case.exact)
    assert torch.equal(decode(steps, tile=SMALL, one_group=True), whole[rows])
