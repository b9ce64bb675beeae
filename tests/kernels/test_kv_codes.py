"""A KV cache of 8-bit codes on CPUs: what is stored, what attention reads, the same bits in any chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitserve.kernels.interface import INT8_SCALE_BYTES, AttentionInputs, RopeInputs
from splitserve.kernels.reference import TorchKernels, dequantize_int8

if TYPE_CHECKING:
    from splitserve.kernels import native_cpu

NUM_BLOCKS, NUM_KV_HEADS, LAYER = 40, 2, 1
REFERENCE = TorchKernels()
Cache = Literal["fp8", "int8"]
several = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
of_any_kind = given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cache=st.sampled_from(["fp8", "int8"]),
    head_dim=st.sampled_from([8, 24, 64, 80, 128]),
    group=st.integers(1, 5),
    planes=st.sampled_from([1, 2]),
    block_size=st.sampled_from([8, 16, 48]),
    length=st.integers(1, 300),
    window=st.none() | st.integers(1, 150),
    softcap=st.sampled_from([0.0, 0.5]),
)


def by_rows(pool: Tensor, head_dim: int) -> Tensor:
    """What the C++ kernels stored, its keys out of their groups (cpu/kv_codes.h)."""
    if pool.shape[2] == 1 or pool.shape[4] % 16:
        return pool
    row = pool.shape[5]
    keys, values = pool.view(torch.uint8).unbind(2)
    codes, scales = keys.reshape(-1, 16 * row).split((16 * head_dim, 16 * (row - head_dim)), 1)
    rows = codes.reshape(-1, head_dim, 16).transpose(1, 2), scales.reshape(len(codes), 16, row - head_dim)
    return torch.stack((torch.cat(rows, 2).view(values.shape), values), 2).view(pool.dtype)


class Case:
    """One sequence whose keys and values were stored by the kernels at hand."""

    def __init__(
        self, native: native_cpu.NativeCpuKernels, dtype: torch.dtype, cache: Cache, head_dim: int,
        group: int, planes: int, block_size: int, length: int, window: int | None = None,
        softcap: float = 0.0,
    ) -> None:  # fmt: skip
        random = torch.Generator().manual_seed(length)
        self.native, self.num_heads, self.length, self.dtype = native, group * NUM_KV_HEADS, length, dtype
        shape = [NUM_BLOCKS, 2, planes, NUM_KV_HEADS, block_size, head_dim]
        if cache == "int8":
            shape[-1] += INT8_SCALE_BYTES
        held = torch.int8 if cache == "int8" else torch.float8_e4m3fn
        self.pool = torch.full(shape, 0x7F, dtype=torch.uint8).view(held)
        self.expected_pool = self.pool.clone()
        self.scales = torch.rand(2, 2, NUM_KV_HEADS, generator=random) + 0.5 if cache == "fp8" else None
        if self.scales is not None and planes == 1:
            self.scales[:, 1] = self.scales[:, 0]
        positions = torch.arange(length, dtype=torch.int32)
        self.table = torch.randperm(NUM_BLOCKS, generator=random).int()
        slots = self.table[positions // block_size].long() * block_size + positions % block_size
        angles = torch.rand(length, head_dim // 2, generator=random) * 6
        self.qkv = torch.randn(
            length, (self.num_heads + planes * NUM_KV_HEADS) * head_dim, generator=random
        ).to(dtype)
        self.rope = RopeInputs(
            positions, slots, torch.cat((angles.cos(), angles.sin()), 1), self.num_heads, NUM_KV_HEADS,
            head_dim, kv_scales=self.scales,
        )  # fmt: skip
        self.inputs = AttentionInputs(
            torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32),
            self.table[None], head_dim**-0.5, window, softcap, kv_scales=self.scales,
        )  # fmt: skip
        self.expected_q = REFERENCE.rope_and_store(self.qkv.clone(), self.expected_pool, LAYER, self.rope)
        self.q = native.rope_and_store(self.qkv, self.pool, LAYER, self.rope)

    def attend(self, start: int, stop: int) -> Tensor:
        inputs = replace(
            self.inputs,
            query_start_loc=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens=torch.tensor([stop], dtype=torch.int32),
        )
        return self.native.paged_attention(self.q[start:stop], self.pool, LAYER, inputs)


@several
@of_any_kind
def test_codes_are_those_of_the_reference_and_are_read_exactly(
    native: native_cpu.NativeCpuKernels, dtype: torch.dtype, cache: Cache, head_dim: int, group: int,
    planes: int, block_size: int, length: int, window: int | None, softcap: float,
) -> None:  # fmt: skip
    case = Case(native, dtype, cache, head_dim, group, planes, block_size, length, window, softcap)
    stored, expected = by_rows(case.pool, head_dim), case.expected_pool
    if dtype == torch.bfloat16:  # a float32's last bit, as the rotation rounds it, may move a code
        assert (stored.view(torch.uint8) == expected.view(torch.uint8)).float().mean() > 0.999
    held = [dequantize_int8(pool) if cache == "int8" else pool.float() for pool in (stored, expected)]
    finite = ~held[1].isnan()
    assert torch.equal(held[0].isnan(), held[1].isnan())
    assert torch.allclose(held[0][finite], held[1][finite], rtol=0.13, atol=0.05)
    wide = REFERENCE.paged_attention(case.q.float(), stored, LAYER, case.inputs)
    found = case.attend(0, length).float()
    assert (found - wide).norm() <= (2e-5 if dtype == torch.float32 else 8e-3) * wide.norm()


@several
@of_any_kind
def test_a_row_has_the_same_bits_alone_and_in_any_chunk(
    native: native_cpu.NativeCpuKernels, dtype: torch.dtype, cache: Cache, head_dim: int, group: int,
    planes: int, block_size: int, length: int, window: int | None, softcap: float,
) -> None:  # fmt: skip
    case = Case(native, dtype, cache, head_dim, group, planes, block_size, length, window, softcap)
    whole = case.attend(0, length)
    for start, stop in ((0, 1), (length // 3, length), (length // 2, length // 2 + 1), (length - 1, length)):
        assert torch.equal(case.attend(start, stop), whole[start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_float8_number_is_stored_and_read_as_torch_does(
    native: native_cpu.NativeCpuKernels, dtype: torch.dtype
) -> None:
    """All codes but NaN are stored as they are given, as keys and values. A query of zeros reads the mean."""
    numbers = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[~numbers.isnan()].view(-1, 2).repeat(1, 64)[:64].to(dtype)
    case = Case(native, dtype, "fp8", 128, 1, 2, 16, len(numbers))
    assert case.scales is not None
    case.scales.fill_(1.0)
    still = replace(case.rope, cos_sin=torch.cat((torch.ones(64, 64), torch.zeros(64, 64)), 1))
    qkv = torch.cat((torch.zeros(64, 256), numbers, numbers, numbers, numbers), 1).to(dtype)
    case.q = native.rope_and_store(qkv, case.pool, LAYER, still)
    blocks = by_rows(case.pool, 128)[case.table[:4].long(), LAYER, :, :].transpose(2, 3).float()
    assert torch.equal(blocks[:, 0, :, 0].reshape(64, 128), numbers.float())
    assert torch.allclose(case.attend(63, 64)[0, :128].float(), numbers.float().mean(0), rtol=0.01, atol=1e-4)


def test_a_row_that_is_not_finite_stays_so_in_int8(native: native_cpu.NativeCpuKernels) -> None:
    case = Case(native, torch.bfloat16, "int8", 64, 1, 2, 16, 20)
    case.qkv[7, -3] = torch.nan
    native.rope_and_store(case.qkv, case.pool, LAYER, case.rope)
    assert case.attend(19, 20).isnan().any()
    assert not case.attend(6, 7).isnan().any()
