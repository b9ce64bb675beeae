"""FlashAttention-3 gets its arguments as its package documents them (the package is played: its call's
signature, with attention in float64 inside), and is used only where its answers agree."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.played_gpu import played_gpu
from torch import Tensor

from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.kernel_inputs import LAYER, attention_case, relative_error
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu.attention_tiles import TileShape
from splitserve.kernels.gpu.flash_attention import FlashAttention3, usable_flash_attention
from splitserve.kernels.reference import TorchKernels
from splitserve.kernels.select import select_kernels

triton_interpreter.install()


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, qv: None = None,
    rotary_cos: None = None, rotary_sin: None = None, cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None, cache_leftpad: None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: None = None, max_seqlen_q: int | None = None,
    rotary_seqlens: None = None, q_descale: None = None, k_descale: None = None, v_descale: None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: None = None, num_splits: int = 0, pack_gqa: None = None, sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:  # fmt: skip
    """The signature of hopper/flash_attn_interface.py in Dao-AILab/flash-attention: q [total_q, heads,
    head_dim] with cu_seqlens_q, caches [num_blocks, page_size, kv_heads, head_dim]."""
    assert cache_seqlens is not None
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert cache_seqlens.dtype == page_table.dtype == cu_seqlens_q.dtype == torch.int32
    assert page_table.stride(-1) == q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert len(page_table) == len(cache_seqlens) == len(cu_seqlens_q) - 1
    assert causal
    assert softmax_scale
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    out = torch.zeros_like(q)
    for row, length in enumerate(cache_seqlens.tolist()):
        first, last = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
        blocks = page_table[row, : -(-length // k_cache.shape[1])].long()
        group = q.shape[1] // k_cache.shape[2]
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[first:last].double(), keys) * softmax_scale
        at = torch.arange(length, device=q.device)
        distance = at[length - (last - first) :, None] - at
        left = length if window_size[0] < 0 else window_size[0]
        scores = scores.masked_fill((distance < 0) | (distance > left), -torch.inf)
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))

    def install(call: Callable[..., Any]) -> None:
        module: Any = SimpleNamespace(flash_attn_with_kvcache=call)
        monkeypatch.setitem(sys.modules, "flash_attn_interface", module)

    return install


@pytest.mark.parametrize("window", [None, 30])
def test_it_gets_the_pages_that_triton_gets(window: int | None) -> None:
    kernels = CudaKernels(
        1, prefill_shape=TileShape(16, 32, 4, 3), flash=FlashAttention3(flash_attn_with_kvcache)
    )
    case = attention_case([70, 9, 45], [20, 1, 45], block_size=16, window=window)
    inputs = replace(case.inputs, max_query_len=45)
    assert relative_error(kernels.paged_attention(case.q, case.pool, LAYER, inputs), case.exact) < 4e-3
    assert not inputs.plans, "Triton has planned nothing"


def test_it_serves_launched_steps_with_prompts_in_16_bits() -> None:
    flash, case = FlashAttention3(flash_attn_with_kvcache), attention_case([9], [5])
    inputs = replace(case.inputs, max_query_len=5)
    assert flash.serves(case.q, case.pool, inputs)
    assert not flash.serves(case.q, case.pool, case.inputs), "in a graph the host knows no lengths"
    assert not flash.serves(case.q, case.pool, replace(inputs, max_query_len=1)), "decode"
    assert not flash.serves(case.q, case.pool.to(torch.float8_e4m3fn), inputs)
    assert not flash.serves(case.q.float(), case.pool.float(), inputs)


def test_it_is_used_where_it_agrees(hopper: Callable[[Callable[..., Any]], None]) -> None:
    device, ours = torch.device("cpu"), TorchKernels().paged_attention
    assert usable_flash_attention(device, ours)[1].startswith("FlashAttention-3 is not installed")
    hopper(flash_attn_with_kvcache)
    flash, named = usable_flash_attention(device, ours)
    assert flash is not None
    assert named == "FlashAttention-3 for steps with prompts"
    hopper(lambda *args, **options: flash_attn_with_kvcache(*args, **{**options, "window_size": (-1, -1)}))
    flash, named = usable_flash_attention(device, ours)
    assert flash is None
    assert "does not agree with Triton" in named, "it leaves the window out"
    hopper(lambda q, k_cache, v_cache, block_table: q)
    flash, named = usable_flash_attention(device, ours)
    assert flash is None
    assert "failed its check (TypeError" in named, "of another version"


def test_the_log_names_it(
    hopper: Callable[[Callable[..., Any]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with played_gpu(monkeypatch):
        hopper(flash_attn_with_kvcache)
        device = torch.device("cuda", 0)
        for exact, named in ((False, "FlashAttention-3 for steps with prompts"), (True, "exact")):
            kernels: Any = select_kernels(device, 1, exact)
            assert (kernels._flash is None) == exact
            assert caplog.messages[-1] == f"kernels: Triton on a played GPU, 1 multiprocessors; {named}"


def test_other_gpus_have_none(
    hopper: Callable[[Callable[..., Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper(flash_attn_with_kvcache)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (8, 0))
    assert usable_flash_attention(torch.device("cpu"), TorchKernels().paged_attention)[0] is None
