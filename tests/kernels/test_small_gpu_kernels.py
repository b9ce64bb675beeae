"""Norms, rotary embedding and cache write, gate, embedding, copies and checksums of the GPU, in Triton's
interpreter, against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from xxhash import xxh3_64_intdigest

from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.kernel_inputs import randn, relative_error
from splitserve.kernels.gpu.elementwise import embedding, gate_mul
from splitserve.kernels.gpu.kv_blocks import block_checksums, pack_blocks, unpack_blocks
from splitserve.kernels.gpu.norm import add_rms_norm, rms_norm
from splitserve.kernels.gpu.rope_store import rope_and_store
from splitserve.kernels.interface import RopeInputs
from splitserve.kernels.mixture_shape import ACTIVATIONS
from splitserve.kernels.reference import TorchKernels

triton_interpreter.install()
pytestmark = [
    pytest.mark.usefixtures("guarded_memory"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]

REFERENCE = TorchKernels()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
ALLOWED = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
few = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def guard_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same rows between two of NaN, and the whole."""
    whole = torch.full((len(x) + 2, *x.shape[1:]), torch.nan, dtype=x.dtype)
    whole[1:-1] = x
    return whole[1:-1], whole


@few
@given(rows=st.integers(1, 4), hidden=st.integers(1, 300), dtype=DTYPES, seed=st.integers(0, 99))
def test_add_rms_norm(rows: int, hidden: int, dtype: torch.dtype, seed: int) -> None:
    x, weight = randn(rows, hidden, dtype=dtype, seed=seed), randn(hidden, dtype=dtype, seed=seed + 1)
    residual, whole = guard_rows(randn(rows, hidden, dtype=dtype, seed=seed + 2))
    expected_residual = residual.clone()
    expected = REFERENCE.add_rms_norm(x, expected_residual, weight, 1e-5)
    assert relative_error(add_rms_norm(x, residual, weight, 1e-5), expected) < ALLOWED[dtype]
    assert torch.equal(residual, expected_residual)
    assert whole[[0, -1]].isnan().all()
    assert relative_error(rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5)) < ALLOWED[dtype]


@few
@given(
    rows=st.integers(1, 4),
    n=st.sampled_from([1, 100, 1024, 1500]),
    dtype=DTYPES,
    scale=st.sampled_from([1.0, 30.0]),
)
def test_silu_and_gelu(rows: int, n: int, dtype: torch.dtype, scale: float) -> None:
    gate_up = randn(rows, 2 * n, dtype=dtype) * scale
    for activation in ACTIVATIONS:
        found, expected = gate_mul(gate_up, activation), REFERENCE.gate_mul(gate_up.float(), activation)
        assert relative_error(found, expected) < ALLOWED[dtype]


def test_rows_past_the_last_one_are_left_alone() -> None:
    gate_up = randn(5, 200)
    found = gate_mul(gate_up, "silu", torch.tensor([3], dtype=torch.int32))
    assert torch.equal(found[:3], gate_mul(gate_up[:3], "silu"))
    assert found[3:].isnan().all(), "they were not computed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embedding(dtype: torch.dtype) -> None:
    table = randn(11, 1100, dtype=torch.bfloat16)
    token_ids = torch.tensor([3, 10, -1, 0, 11], dtype=torch.int32)
    expected = table[token_ids.clamp(0, 10).long()].to(dtype)
    expected[[2, 4]] = 0  # padding rows
    assert torch.equal(embedding(table, token_ids, dtype), expected)


@few
@given(
    data=st.data(),
    dtype=DTYPES,
    head_dim=st.sampled_from([16, 64, 96]),
    heads=st.sampled_from([(1, 1), (2, 3), (7, 1)]),
    norm=st.integers(0, 2),
    fp8=st.booleans(),
)
def test_rope_and_store(
    data: st.DataObject, dtype: torch.dtype, head_dim: int, heads: tuple[int, int], norm: int, fp8: bool
) -> None:
    num_heads, num_kv_heads = heads[0] * heads[1], heads[1]
    num_tokens = data.draw(st.integers(1, 4))
    qkv, whole = guard_rows(randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype))
    pool = torch.full((3, 2, 2, num_kv_heads, 8, head_dim), torch.nan).to(
        torch.float8_e4m3fn if fp8 else dtype
    )
    expected_pool = pool.clone()
    slots = data.draw(st.lists(st.integers(0, 23), min_size=num_tokens, max_size=num_tokens, unique=True))
    slots[0] = -1 if data.draw(st.booleans()) else slots[0]
    scales = (
        0.002 + 0.01 * torch.rand((2, 2, num_kv_heads), generator=torch.Generator().manual_seed(1))
        if fp8
        else None
    )
    rope = RopeInputs(
        positions=torch.arange(num_tokens, dtype=torch.int32) + 3,
        slot_mapping=torch.tensor(slots),
        cos_sin=randn(16, head_dim, seed=1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_norm=randn(*([num_heads] * (norm - 1)), head_dim, dtype=dtype, seed=2) if norm else None,
        k_norm=randn(*([num_kv_heads] * (norm - 1)), head_dim, dtype=dtype, seed=3) if norm else None,
        norm_eps=1e-6,
        kv_scales=scales,
    )
    expected = REFERENCE.rope_and_store(qkv.clone(), expected_pool, 1, rope)
    found = rope_and_store(qkv, pool, 1, rope)
    assert relative_error(found, expected) < ALLOWED[dtype]
    assert whole[[0, -1]].isnan().all()
    pool, expected_pool = pool.float(), expected_pool.float()
    assert torch.equal(pool.isnan(), expected_pool.isnan())
    pool, expected_pool = pool.nan_to_num(), expected_pool.nan_to_num()
    if not fp8:
        assert relative_error(pool, expected_pool) < ALLOWED[dtype]
    else:  # a value next to a rounding boundary may fall on its other side
        assert torch.allclose(pool, expected_pool, rtol=1 / 8, atol=2**-9)
        assert (pool != expected_pool).sum() <= 1 + 0.02 * expected_pool.count_nonzero()


@given(
    block_bytes=st.sampled_from([256, 320, 1024, 1088, 2048, 20480]),
    blocks=st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
@few
def test_a_checksum_is_the_cpus(block_bytes: int, blocks: list[int]) -> None:
    pool = torch.randint(
        0, 256, (5, block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(block_bytes)
    )
    found = [
        checksum & 0xFFFFFFFFFFFFFFFF for checksum in block_checksums(pool, torch.tensor(blocks)).tolist()
    ]
    assert found == [xxh3_64_intdigest(pool[block].numpy().data) for block in blocks]


@given(
    blocks=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
    cut=st.sampled_from([(0, 20480), (4096, 8192), (16, 8)]),
)
@few
def test_blocks_are_packed_and_unpacked(blocks: list[int], cut: tuple[int, int]) -> None:
    first, width = cut
    pool = torch.randint(0, 256, (6, 20480), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    index = torch.tensor(blocks, dtype=torch.int32)
    packed = torch.empty((len(blocks), width), dtype=torch.uint8)
    pack_blocks(pool, index, packed, first)
    assert torch.equal(packed, pool[blocks, first : first + width])
    whole = torch.full((8, 20480), 7, dtype=torch.uint8)
    expected = whole.clone()
    expected[1:-1][blocks, first : first + width] = packed
    unpack_blocks(packed, index, whole[1:-1], first)
    assert torch.equal(whole, expected)
