"""Other packages get their arguments as they document them (each is played: its call's signature, with
attention in float64 inside), and are used only where their answers agree."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.played_gpu import played_gpu
from torch import Tensor

from splitserve.bench.kernels import triton_interpreter
from splitserve.bench.kernels.kernel_inputs import LAYER, attention_case, relative_error
from splitserve.engine.settings import KVDType
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu import provided_attention
from splitserve.kernels.gpu.attention_tiles import TileShape
from splitserve.kernels.gpu.provided_attention import (
    FLASH_ATTENTION_3,
    FLASHINFER,
    FlashAttention3,
    FlashInferDecode,
    usable,
)
from splitserve.kernels.interface import AttentionShape
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


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: int, cu_seqlens_q: Tensor, max_seqlen_k: int,
    cu_seqlens_k: None = None, seqused_k: Tensor | None = None, q_v: None = None, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int] | None = None,
    softcap: float = 0.0, alibi_slopes: None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, return_softmax_lse: bool = False,
    out: None = None, scheduler_metadata: None = None, q_descale: None = None, k_descale: None = None,
    v_descale: None = None, num_splits: int = 0, fa_version: int = 2, s_aux: None = None,
) -> Tensor:  # fmt: skip
    """The signature of vllm_flash_attn/flash_attn_interface.py in vllm-project/flash-attention."""
    assert fa_version == 3
    assert seqused_k is not None
    assert max_seqlen_k >= int(seqused_k.max())
    assert window_size is not None
    return flash_attn_with_kvcache(
        q, k, v, cache_seqlens=seqused_k, page_table=block_table, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, causal=causal,
        window_size=(window_size[0], window_size[1]),
    )  # fmt: skip


def xqa_batch_decode_with_kv_cache(
    query: Tensor, kv_cache: tuple[Tensor, Tensor], workspace_buffer: Tensor, block_tables: Tensor,
    seq_lens: Tensor, max_seq_len: int, bmm1_scale: float = 1.0, bmm2_scale: float = 1.0,
    window_left: int = -1, out: None = None, sinks: None = None, kv_layout: str = "NHD",
    enable_pdl: bool | None = None, q_len_per_req: int | None = 1, o_scale: float | None = 1.0,
    mask: None = None,
) -> Tensor:  # fmt: skip
    """The signature of flashinfer/decode.py in flashinfer-ai/flashinfer, versions 0.6 and 0.7: query
    [num_seqs, heads, head_dim], caches [num_blocks, kv_heads, page_size, head_dim] for HND. It rounds queries
    to float8, as the kernel for Hopper does."""
    assert kv_layout == "HND"
    assert query.is_contiguous()
    assert block_tables.is_contiguous()
    assert not workspace_buffer.any(), "it is zero for the first use"
    assert workspace_buffer.dtype == torch.uint8
    keys, values = (cache.transpose(1, 2) for cache in kv_cache)
    assert keys.dtype == values.dtype == torch.float8_e4m3fn
    assert max_seq_len >= int(seq_lens.max())
    assert int(seq_lens.min()) >= 1
    return bmm2_scale * flash_attn_with_kvcache(
        query.to(torch.float8_e4m3fn).to(query.dtype), keys, values, cache_seqlens=seq_lens,
        page_table=block_tables, cu_seqlens_q=torch.arange(len(query) + 1, dtype=torch.int32),
        max_seqlen_q=1, softmax_scale=bmm1_scale, causal=True, window_size=(window_left, 0),
    )  # fmt: skip


SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, windows=(None, 4096, 30))
CPU, OURS = torch.device("cpu"), TorchKernels().paged_attention
FLASH, XQA = "flash_attn_interface", "flashinfer.decode"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a call that installs a package with these functions."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(provided_attention, "WORKSPACE_BYTES", 1 << 10)

    def install(package: str, **calls: Callable[..., Any]) -> None:
        module: Any = SimpleNamespace(**calls)
        for name in (package.partition(".")[0], package):
            monkeypatch.setitem(sys.modules, name, module)

    return install


@pytest.mark.parametrize("window", [None, 30])
def test_flash_attention_gets_the_pages_that_triton_gets(window: int | None) -> None:
    kernels = CudaKernels(
        1, prefill_shape=TileShape(16, 32, 4, 3), provided=FlashAttention3(flash_attn_with_kvcache)
    )
    case = attention_case([70, 9, 45], [20, 1, 45], block_size=16, window=window)
    inputs = replace(case.inputs, max_query_len=45)
    assert relative_error(kernels.paged_attention(case.q, case.pool, LAYER, inputs), case.exact) < 4e-3
    assert not inputs.plans, "Triton has planned nothing"


def test_flash_attention_serves_launched_steps_with_prompts_in_16_bits() -> None:
    flash, case = FlashAttention3(flash_attn_with_kvcache), attention_case([9], [5])
    inputs = replace(case.inputs, max_query_len=5)
    assert flash.serves(case.q, case.pool, inputs)
    assert not flash.serves(case.q, case.pool, case.inputs), "in a graph the host knows no lengths"
    assert not flash.serves(case.q, case.pool, replace(inputs, max_query_len=1)), "decode"
    assert not flash.serves(case.q, case.pool.to(torch.float8_e4m3fn), inputs)
    assert not flash.serves(case.q.float(), case.pool.float(), inputs)


def test_flash_attention_is_used_where_it_agrees(hopper: Callable[..., None]) -> None:
    assert usable(FLASH_ATTENTION_3, CPU, SHAPE, OURS)[1].startswith("FlashAttention-3 is not installed")
    hopper(FLASH, flash_attn_with_kvcache=flash_attn_with_kvcache)
    flash, named = usable(FLASH_ATTENTION_3, CPU, SHAPE, OURS)
    assert flash is not None
    assert named == "FlashAttention-3 for steps with prompts"

    def without_window(*args: Any, **options: Any) -> Tensor:
        return flash_attn_with_kvcache(*args, **{**options, "window_size": (-1, -1)})

    hopper(FLASH, flash_attn_with_kvcache=without_window)
    flash, named = usable(FLASH_ATTENTION_3, CPU, SHAPE, OURS)
    assert flash is None
    assert "does not agree with Triton" in named
    assert usable(FLASH_ATTENTION_3, CPU, replace(SHAPE, windows=(None,)), OURS)[0] is not None
    hopper(FLASH, flash_attn_with_kvcache=lambda q, k_cache, v_cache, block_table: q)
    flash, named = usable(FLASH_ATTENTION_3, CPU, SHAPE, OURS)
    assert flash is None
    assert "failed its check (TypeError" in named, "of another version"


def test_the_build_in_vllm_serves_as_well(hopper: Callable[..., None]) -> None:
    hopper("vllm.vllm_flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    flash, named = usable(FLASH_ATTENTION_3, CPU, SHAPE, OURS)
    assert isinstance(flash, FlashAttention3)
    assert named == "FlashAttention-3 for steps with prompts"


def test_flashinfer_decodes_a_float8_cache_where_it_agrees(hopper: Callable[..., None]) -> None:
    assert usable(FLASHINFER, CPU, SHAPE, OURS)[1].startswith("FlashInfer is not installed")
    hopper(XQA, xqa_batch_decode_with_kv_cache=xqa_batch_decode_with_kv_cache)
    found, named = usable(FLASHINFER, CPU, SHAPE, OURS)
    assert isinstance(found, FlashInferDecode)
    assert named == "FlashInfer for decode over the float8 cache"

    def unscaled(*args: Any, **options: Any) -> Tensor:
        return xqa_batch_decode_with_kv_cache(*args, **{**options, "bmm2_scale": 1.0})

    hopper(XQA, xqa_batch_decode_with_kv_cache=unscaled)
    found, named = usable(FLASHINFER, CPU, SHAPE, OURS)
    assert found is None
    assert "FlashInfer does not agree with Triton" in named


def test_flashinfer_serves_single_queries_over_float8_with_one_scale_a_layer() -> None:
    """A padding row, of length 0, costs the others nothing."""
    decode = FlashInferDecode(xqa_batch_decode_with_kv_cache, CPU)
    decode._workspace = torch.zeros(16, dtype=torch.uint8)
    case = attention_case([70, 9, 33], [1, 1, 1], block_size=16, fp8=True)
    scales = case.inputs.kv_scales
    assert scales is not None
    q = case.q.bfloat16()
    assert not decode.serves(q, case.pool, case.inputs), "its heads have scales of their own"
    alike = scales[:, :, :1].expand_as(scales).nan_to_num(1.0)
    inputs = replace(case.inputs, kv_scales=alike)
    assert decode.serves(q, case.pool, inputs)
    assert not decode.serves(q.half(), case.pool, inputs)
    assert not decode.serves(q, case.pool.bfloat16(), inputs)
    assert not decode.serves(q.repeat(2, 1, 1), case.pool, inputs), "chunks of prompts"
    kernels = CudaKernels(1, prefill_shape=TileShape(16, 32, 4, 3), provided=decode)
    padded = replace(inputs, seq_lens=inputs.seq_lens * torch.tensor([1, 0, 1], dtype=torch.int32))
    expected = OURS(q, case.pool, LAYER, inputs)[[0, 2]]
    assert relative_error(kernels.paged_attention(q, case.pool, LAYER, padded)[[0, 2]], expected) < 0.05


def test_the_log_names_it(
    hopper: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with played_gpu(monkeypatch):
        hopper(FLASH, flash_attn_with_kvcache=flash_attn_with_kvcache)
        device = torch.device("cuda", 0)
        cases: list[tuple[bool, KVDType, str]] = [
            (False, "auto", "FlashAttention-3 for steps with prompts"),
            (False, "fp8", "FlashInfer is not installed"),
            (True, "auto", "exact"),
        ]
        for exact, kv_dtype, named in cases:
            kernels: Any = select_kernels(device, 1, exact, kv_dtype=kv_dtype, shape=SHAPE)
            assert (kernels._provided is None) == (exact or kv_dtype == "fp8")
            assert f"kernels: Triton on a played GPU, 1 multiprocessors; {named}" in caplog.messages[-1]


def test_other_gpus_have_none(hopper: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    hopper(FLASH, flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (8, 0))
    assert usable(FLASH_ATTENTION_3, CPU, SHAPE, OURS)[1] == "FlashAttention-3 is for Hopper GPUs"
