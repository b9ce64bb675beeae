"""The C++ kernels compute what the plain torch ones do, on every instruction set this machine has."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitserve.kernels import packed_weights
from splitserve.kernels.interface import AttentionInputs, RopeInputs
from splitserve.kernels.measured_choice import NEVER, KernelChoices
from splitserve.kernels.mixture_shape import ACTIVATIONS
from splitserve.kernels.reference import TorchKernels
from splitserve.kernels.select import cpu_multiplies_bfloat16

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
_cpu = native_cpu._cpu

REFERENCE = TorchKernels()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
HEAD_DIMS = st.sampled_from([8, 16, 24, 64, 80, 128])
several = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def assert_close(found: Tensor, expected: Tensor, scale: Tensor | None = None) -> None:
    """Relative to the largest value (or to `scale`, where a sum's terms may cancel): float32 differs by the
    order of sums, bfloat16 by its last bit or two."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    allowed = 2e-5 if found.dtype == torch.float32 else 2e-2
    assert (found.float() - expected.float()).abs().max() <= allowed * (
        expected if scale is None else scale
    ).float().abs().max() + 1e-30


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_key_groups(pool: Tensor) -> Tensor:
    """A pool of keys and values as the C++ kernels lay it out (cpu/kv_codes.h)."""
    if pool.shape[4] % 16:
        return pool
    keys, values = pool.view(torch.int32).unbind(2)
    groups = keys.unflatten(3, (-1, 16)).transpose(4, 5).reshape(keys.shape)  # type: ignore[no-untyped-call]
    return torch.stack((groups, values), 2).view(pool.dtype)


@several
@given(
    m=st.integers(1, 90),
    n=st.integers(1, 70),
    k=st.integers(1, 900),
    dtype=DTYPES,
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear(
    native: native_cpu.NativeCpuKernels, m: int, n: int, k: int, dtype: torch.dtype, bias: bool, seed: int
) -> None:
    x, weight = randn(m, k, dtype=dtype, seed=seed), randn(n, k, dtype=dtype, seed=seed + 1)
    offset = randn(n, dtype=dtype) if bias else None
    exact = REFERENCE.linear(weight.float(), None if offset is None else offset.float())(x.float())
    terms = x.float().abs() @ weight.float().abs().T
    assert_close(
        native.linear(weight, offset)(x),
        exact.to(dtype),
        scale=exact.abs() + 1e-3 * terms if dtype == torch.bfloat16 else terms,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 48, 77])
@pytest.mark.parametrize("heights", [(70,), (5, 40, 3), (64, 64)])
def test_several_threads_pack_parts_into_panels_as_one_matrix(
    native: native_cpu.NativeCpuKernels, dtype: torch.dtype, k: int, heights: tuple[int, ...]
) -> None:
    parts = [randn(height, k, dtype=dtype, seed=height) for height in heights]
    n, panel = sum(heights), native._panel
    whole = torch.nn.functional.pad(torch.cat(parts), (0, k % 2, 0, -n % panel))
    step = 1 if dtype == torch.float32 else 2  # numbers of k that lie interleaved
    expected = whole.view(-1, panel, (k + k % 2) // step, step).transpose(1, 2).flatten()
    stale = torch.full_like(expected, 7)
    packed = native_cpu.PackedWeights(num_threads=3)
    packed._arena.empty = lambda count, _: stale.view(torch.uint8)[:count]  # type: ignore[method-assign]
    found = native_cpu.PackedLinear(parts, None, packed)
    assert torch.equal(found._packed.view(dtype), expected)


needs_codes = pytest.mark.skipif("avx512_bf16" not in _cpu.instruction_sets(), reason="needs AVX512-BF16")


def uneven(n: int, k: int, kind: str) -> Tensor:
    weight = randn(n, k, dtype=torch.bfloat16)
    if kind == "outliers":
        weight[::5, 3] *= 1e9
        weight[1::7, k // 2] = torch.inf
    if kind == "tiny":
        weight[::9, ::40] *= 2.0**-30
        weight[:, 1::50] = torch.tensor(1e-40).bfloat16()
        weight[3, :] = 0.0
        weight[:, 7] = -0.0
    return weight


@needs_codes
@pytest.mark.parametrize("kind", ["even", "outliers", "tiny"])
@pytest.mark.parametrize(("n", "k"), [(70, 64), (33, 320), (128, 1024)])
@pytest.mark.parametrize("threads", [1, 2])
def test_coded_weights_multiply_with_the_same_bits(kind: str, n: int, k: int, threads: int) -> None:
    _cpu.use_instruction_set("avx512_bf16")
    _cpu.set_num_threads(threads)
    weight, bias = uneven(n, k, kind), randn(n, dtype=torch.bfloat16)
    plain, coded = (
        native_cpu.PackedLinear(
            [weight[:5], weight[5:]], bias, native_cpu.PackedWeights(num_threads=threads), coded=as_codes
        )
        for as_codes in (False, True)
    )
    assert coded.coded
    assert coded._packed.nbytes < 0.77 * plain._packed.nbytes
    for m in (*range(1, 14), 24, 25, 37, 400):
        x = randn(m, k, dtype=torch.bfloat16, seed=m)
        assert torch.equal(plain(x).view(torch.int16), coded(x).view(torch.int16))
    _cpu.set_num_threads(1)


@needs_codes
def test_weights_of_too_many_exponents_stay_plain() -> None:
    _cpu.use_instruction_set("avx512_bf16")
    weight = randn(40, 128, dtype=torch.bfloat16)
    weight[0, :16] *= 2.0**-60
    for matrix in (weight, randn(40, 100, dtype=torch.bfloat16), randn(40, 128, dtype=torch.float32)):
        packed = native_cpu.PackedWeights()
        linear = native_cpu.PackedLinear(matrix, None, packed, coded=True)
        assert not linear.coded
        assert [memory.nbytes for memory in packed._given] == [linear._packed.nbytes]
        x = randn(3, matrix.shape[1], dtype=matrix.dtype)
        assert torch.equal(linear(x), native_cpu.PackedLinear(matrix, None, native_cpu.PackedWeights())(x))


@needs_codes
def test_the_next_start_finds_weights_in_the_form_they_were_kept_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 0)
    _cpu.use_instruction_set("avx512_bf16")
    weights = [uneven(n, 128, "outliers") for n in (64, 40, 64)]
    weights[1][0, :16] = torch.arange(16).bfloat16().exp2() * 2.0**-90

    def start() -> list[native_cpu.PackedLinear]:
        packed = native_cpu.PackedWeights([tmp_path / "weights.packed"])
        linears = [native_cpu.PackedLinear(weight, None, packed, coded=True) for weight in weights]
        thread = packed.finish()
        assert thread is not None
        thread.join(10)
        return linears

    first = start()
    monkeypatch.setattr(_cpu, "pack_linear", lambda *_: pytest.fail("packed again"))
    second = start()
    assert [linear.coded for linear in second] == [linear.coded for linear in first] == [True, False, True]
    for before, after in zip(first, second, strict=True):
        assert torch.equal(before._packed, after._packed)


@pytest.mark.skipif(not cpu_multiplies_bfloat16(), reason="this CPU has neither AVX512-BF16 nor AMX")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 8, NEVER])
def test_a_linear_is_onednns_from_as_many_rows_as_were_measured(bias: bool, rows: int) -> None:
    choices = KernelChoices(None, "")
    choices.made["100x64"] = rows
    kernels = native_cpu.NativeCpuKernels(1, _cpu.instruction_sets()[0], choices)
    weight = randn(100, 64, dtype=torch.bfloat16)
    linear = kernels.linear(weight, offset := randn(100, dtype=torch.bfloat16) if bias else None)
    kinds = {0: native_cpu.OneDnnLinear, 8: native_cpu.LinearByRows, NEVER: native_cpu.PackedLinear}
    assert type(linear) is kinds[rows]
    for m in (1, 7, 8, 130):
        x = randn(m, 64, dtype=torch.bfloat16, seed=m)
        exact = REFERENCE.linear(weight.float(), None if offset is None else offset.float())(x.float())
        assert_close(linear(x), exact.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [500, 3001])  # the odd one takes a block of few rows
def test_a_row_of_a_linear_does_not_depend_on_the_rows_beside_it(
    native: native_cpu.NativeCpuKernels, dtype: torch.dtype, k: int
) -> None:
    x, linear = randn(300, k, dtype=dtype), native.linear(randn(41, k, dtype=dtype), None)
    together = linear(x)
    for count in (1, 2, 5, 12, 13, 24, 25, 64, 257):
        assert torch.equal(linear(x[:count].clone()), together[:count])


@several
@given(rows=st.integers(1, 9), n=st.integers(1, 200), dtype=DTYPES, seed=st.integers(0, 99))
def test_add_rms_norm(
    native: native_cpu.NativeCpuKernels, rows: int, n: int, dtype: torch.dtype, seed: int
) -> None:
    x, weight = randn(rows, n, dtype=dtype, seed=seed), randn(n, dtype=dtype, seed=seed + 1)
    residual = randn(rows, n, dtype=dtype, seed=seed + 2)
    expected_residual = residual.clone()
    expected = REFERENCE.add_rms_norm(x, expected_residual, weight, 1e-5)
    assert_close(native.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert_close(residual, expected_residual)
    assert_close(native.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


@several
@given(rows=st.integers(1, 9), n=st.integers(1, 200), dtype=DTYPES, scale=st.sampled_from([1.0, 100.0]))
def test_silu_and_gelu(
    native: native_cpu.NativeCpuKernels, rows: int, n: int, dtype: torch.dtype, scale: float
) -> None:
    gate_up = randn(rows, 2 * n, dtype=dtype) * scale
    for activation in ACTIVATIONS:
        assert_close(native.gate_mul(gate_up, activation), REFERENCE.gate_mul(gate_up, activation))


@several
@given(
    data=st.data(),
    dtype=DTYPES,
    head_dim=HEAD_DIMS,
    group=st.integers(1, 4),
    num_kv_heads=st.integers(1, 3),
    norm=st.integers(0, 2),
    block_size=st.sampled_from([8, 16, 48]),
)
def test_rope_and_store(
    native: native_cpu.NativeCpuKernels,
    data: st.DataObject,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    num_kv_heads: int,
    norm: int,
    block_size: int,
) -> None:
    num_tokens = data.draw(st.integers(1, 6))
    num_heads = group * num_kv_heads
    qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    pool = torch.full((4, 2, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    expected_pool = pool.clone()
    slots = torch.tensor(
        data.draw(
            st.lists(
                st.integers(0, 4 * block_size - 1), min_size=num_tokens, max_size=num_tokens, unique=True
            )
        )
    )
    rope = RopeInputs(
        positions=torch.arange(num_tokens, dtype=torch.int32) + 3,
        slot_mapping=slots,
        cos_sin=randn(16, head_dim, dtype=torch.float32, seed=1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_norm=randn(*([num_heads] * (norm - 1)), head_dim, dtype=dtype, seed=2) if norm else None,
        k_norm=randn(*([num_kv_heads] * (norm - 1)), head_dim, dtype=dtype, seed=3) if norm else None,
        norm_eps=1e-6,
    )
    expected = REFERENCE.rope_and_store(qkv.clone(), expected_pool, 1, rope)
    assert_close(native.rope_and_store(qkv, pool, 1, rope), expected)
    expected_pool = with_key_groups(expected_pool)
    assert torch.equal(pool.isnan(), expected_pool.isnan())
    assert_close(pool.nan_to_num(), expected_pool.nan_to_num())


@several
@given(
    data=st.data(),
    dtype=DTYPES,
    head_dim=HEAD_DIMS,
    group=st.integers(1, 7),
    num_kv_heads=st.integers(1, 3),
    block_size=st.sampled_from([1, 8, 16, 24, 128]),
    window=st.none() | st.integers(1, 150),
    softcap=st.sampled_from([0.0, 0.5]),
    sinks=st.booleans(),
)
def test_paged_attention(
    native: native_cpu.NativeCpuKernels,
    data: st.DataObject,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
    softcap: float,
    sinks: bool,
) -> None:
    """Sequences of one query and of many, in one batch; slots that belong to no token are NaN, table entries
    past the end nonsense."""
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    queries = [data.draw(st.just(1) | st.integers(1, length)) for length in lengths]
    counts = [-(-length // block_size) for length in lengths]
    blocks = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).int()
    pool = torch.full((len(blocks), 2, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    tables = torch.full((len(lengths), max(counts)), -(1 << 30), dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = blocks[sum(counts[:row]) :][:count]
        for position in range(length):
            block = tables[row, position // block_size]
            pool[block, 1, :, :, position % block_size] = randn(
                2, num_kv_heads, head_dim, dtype=dtype, seed=position
            )
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    wide = randn(
        int(starts[-1]), group * num_kv_heads + 3, head_dim, dtype=dtype
    )  # q is a slice of a wider row, as in qkv
    q = wide[:, : group * num_kv_heads]
    inputs = AttentionInputs(
        starts,
        torch.tensor(lengths, dtype=torch.int32),
        tables,
        scale=head_dim**-0.5,
        sliding_window=window,
        softcap=softcap,
    )
    if sinks:
        inputs = replace(inputs, sinks=randn(len(q[0]), dtype=torch.float32, seed=5) * 3)
    exact = REFERENCE.paged_attention(q.float(), pool.float(), 1, inputs)
    assert_close(native.paged_attention(q, with_key_groups(pool), 1, inputs), exact.to(dtype))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    dtype=DTYPES,
    head_dim=HEAD_DIMS,
    group=st.integers(1, 7),
    length=st.integers(1, 300),
    block_size=st.sampled_from([1, 16, 24]),
    window=st.none() | st.integers(1, 150),
    softcap=st.sampled_from([0.0, 0.5]),
    cuts=st.lists(st.integers(1, 299), max_size=6),
    others=st.integers(0, 3),
    sinks=st.booleans(),
)
def test_attention_gives_a_row_the_same_bits_in_any_chunk_and_batch(
    native: native_cpu.NativeCpuKernels,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    length: int,
    block_size: int,
    window: int | None,
    softcap: float,
    cuts: list[int],
    others: int,
    sinks: bool,
) -> None:
    """Whole, in chunks, token by token: so prefill and decode agree, whatever was cached."""
    num_blocks = -(-length // block_size)
    pool = randn(num_blocks, 1, 2, 2, block_size, head_dim, dtype=dtype) * 3
    q = randn(length, 2 * group, head_dim, dtype=dtype, seed=1) * 3
    tables = torch.randperm(num_blocks).int()[None]

    def run(start: int, stop: int) -> Tensor:
        """The rows [start, stop), beside ``others`` sequences of one query each."""
        rows = torch.cat((q[:others], q[start:stop]))
        starts = torch.tensor([*range(others + 1), others + stop - start], dtype=torch.int32)
        lengths = torch.tensor([min(7, length)] * others + [stop], dtype=torch.int32)
        inputs = AttentionInputs(
            starts, lengths, tables.repeat(others + 1, 1), head_dim**-0.5, window, softcap,
            sinks=torch.linspace(-2, 2, rows.shape[1]) if sinks else None,
        )  # fmt: skip
        return native.paged_attention(rows, pool, 0, inputs)[others:]

    others = min(others, length)
    whole = run(0, length)
    edges = sorted({0, length, *(c for c in cuts if c < length)})
    for start, stop in itertools.pairwise(edges):
        assert torch.equal(run(start, stop), whole[start:stop])
    for row in {0, length // 2, length - 1}:
        assert torch.equal(run(row, row + 1), whole[row : row + 1])


def test_gumbel_argmax(native: native_cpu.NativeCpuKernels) -> None:
    logits = randn(40, 1003, dtype=torch.float32) * 2
    logits[1, 7:] = -torch.inf
    keys = torch.randint(0, 2**32, (40, 2), generator=torch.Generator().manual_seed(5))
    assert torch.equal(native.gumbel_argmax(logits, keys), REFERENCE.gumbel_argmax(logits, keys))


def test_threads_share_a_call_without_changing_it(native: native_cpu.NativeCpuKernels) -> None:
    x, weight = randn(70, 300, dtype=torch.float32), randn(500, 300, dtype=torch.float32)
    alone = native.linear(weight, None)(x)
    _cpu.set_num_threads(3)
    try:
        assert torch.equal(native.linear(weight, None)(x), alone)
    finally:
        _cpu.set_num_threads(1)
