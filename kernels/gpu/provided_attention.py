"""Attention of other packages, each used where it is installed, the GPU is a Hopper, and its answers agree at
start with Triton's on a small case in the model's own shape. Triton computes all other steps, and exact ones.

    FlashAttention-3       steps with chunks of prompts, decode rows among them, over a cache in 16 bits:
                           flash_attn_interface (Dao-AILab/flash-attention, folder hopper), else the build in
                           vLLM (vllm.vllm_flash_attn). (Shah et al., FlashAttention-3, 2024.)
    FlashInfer's XQA       decode over a float8 cache, captured steps too; it multiplies in float8
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..interface import AttentionInputs, AttentionShape

CAPABILITY = 9  # Hopper
CHECKED_WINDOW = 40  # tokens, in place of the model's windows
WORKSPACE_BYTES = 128 << 20  # of XQA
FLOAT8 = torch.float8_e4m3fn
Attend = Callable[[Tensor, Tensor, int, AttentionInputs], Tensor]


class ProvidedAttention(Protocol):
    """Called as ``Kernels.paged_attention``, for the steps that it serves."""

    def serves(self, q: Tensor, pool: Tensor, inputs: AttentionInputs) -> bool: ...

    def __call__(self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs) -> Tensor: ...


class FlashAttention3:
    """``call``: flash_attn_interface's ``flash_attn_with_kvcache``. It needs the longest chunk's length,
    which the host knows of a step that it launches."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def serves(self, q: Tensor, pool: Tensor, inputs: AttentionInputs) -> bool:
        """Whether some sequence has several queries, in a 16-bit type that the cache shares."""
        return (inputs.max_query_len or 1) > 1 and q.dtype == pool.dtype and q.itemsize == 2

    def __call__(self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs) -> Tensor:
        """The package wants [num_blocks, block_size, num_kv_heads, head_dim] of keys and of values, in any
        strides with contiguous heads."""
        window = inputs.sliding_window
        out = self._call(
            q,
            pool[:, layer, 0].transpose(1, 2),
            pool[:, layer, 1].transpose(1, 2),
            cache_seqlens=inputs.seq_lens,
            page_table=inputs.block_tables,
            cu_seqlens_q=inputs.query_start_loc,
            max_seqlen_q=inputs.max_query_len,
            softmax_scale=inputs.scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )
        assert isinstance(out, Tensor), "an attention output alone"
        return out.reshape(len(q), -1)


class FlashInferDecode:
    """``call``: flashinfer.decode's ``xqa_batch_decode_with_kv_cache``, which takes one scale of all keys of
    a layer and one of all values."""

    def __init__(self, call: Callable[..., Any], device: torch.device) -> None:
        self._call = call
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._read: tuple[Tensor, list[tuple[float, float]] | None] | None = None

    def serves(self, q: Tensor, pool: Tensor, inputs: AttentionInputs) -> bool:
        """Whether every sequence has one query in bfloat16, over a float8 cache."""
        if len(inputs.seq_lens) != len(q) or q.dtype != torch.bfloat16 or pool.dtype != FLOAT8:
            return False
        return self._scales(inputs) is not None

    def __call__(self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs) -> Tensor:
        scales, window = self._scales(inputs), inputs.sliding_window
        assert scales is not None
        if "at least one" not in inputs.plans:  # padding rows have a length of 0
            inputs.plans["at least one"] = inputs.seq_lens.clamp(min=1)
        out = self._call(
            q.contiguous(),
            (pool[:, layer, 0], pool[:, layer, 1]),
            self._workspace,
            inputs.block_tables,
            inputs.plans["at least one"],
            inputs.block_tables.shape[1] * pool.shape[4],
            bmm1_scale=inputs.scale * scales[layer][0],
            bmm2_scale=scales[layer][1],
            window_left=-1 if window is None else window - 1,
            kv_layout="HND",
            enable_pdl=False,
        )
        assert isinstance(out, Tensor)
        return out.reshape(len(q), -1)

    def _scales(self, inputs: AttentionInputs) -> list[tuple[float, float]] | None:
        """(of keys, of values) by layer; None where heads differ. The host reads a model's scales once, in
        the first step that warms up."""
        held = inputs.kv_scales
        assert held is not None, "a float8 cache has scales"
        if self._read is None or self._read[0] is not held:
            layers = held.tolist()
            alike = all(len(set(heads)) == 1 for layer in layers for heads in layer)
            self._read = held, [(keys[0], values[0]) for keys, values in layers] if alike else None
        return self._read[1]


@dataclass(frozen=True, slots=True)
class Provider:
    """``load`` imports the package. ``allowed``: relative error of the check. ``queries`` and ``lengths``: of
    its sequences, in tokens."""

    name: str
    serving: str
    load: Callable[[torch.device], ProvidedAttention]
    allowed: float
    queries: Sequence[int]
    lengths: Sequence[int]
    cache: torch.dtype


def _flash_attention(device: torch.device) -> FlashAttention3:
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except (ImportError, OSError) as missing:
        try:
            from vllm.vllm_flash_attn import flash_attn_varlen_func
        except (ImportError, OSError):
            raise missing from None
        return FlashAttention3(_as_with_kvcache(flash_attn_varlen_func))
    return FlashAttention3(flash_attn_with_kvcache)


def _as_with_kvcache(varlen: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's call under the other package's names."""

    def call(
        q: Tensor, keys: Tensor, values: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, **options: Any
    ) -> Any:
        longest = page_table.shape[1] * keys.shape[1]
        return varlen(
            q, keys, values, max_seqlen_k=longest, seqused_k=cache_seqlens, block_table=page_table,
            fa_version=3, **options,
        )  # fmt: skip

    return call


def _flashinfer(device: torch.device) -> FlashInferDecode:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    return FlashInferDecode(xqa_batch_decode_with_kv_cache, device)


FLASH_ATTENTION_3 = Provider(
    "FlashAttention-3", "for steps with prompts", _flash_attention, 0.01, (1, 20, 70), (90, 150, 70),
    torch.bfloat16,
)  # fmt: skip
FLASHINFER = Provider(
    "FlashInfer", "for decode over the float8 cache", _flashinfer, 0.05, (1, 1, 1), (90, 150, 1), FLOAT8
)


def usable(
    provider: Provider, device: torch.device, shape: AttentionShape, ours: Attend
) -> tuple[ProvidedAttention | None, str]:
    """It and what to log; None where the package is missing, the GPU is none of its kind, or its answers are
    not those of ``ours``."""
    name = provider.name
    try:
        theirs = provider.load(device)
    except (ImportError, OSError) as missing:
        return None, f"{name} is not installed ({str(missing).splitlines()[0]})"
    if torch.cuda.get_device_capability(device)[0] != CAPABILITY:
        return None, f"{name} is for Hopper GPUs"
    try:
        errors = [
            _difference(theirs, ours, *_case(provider, device, shape, window))
            for window in sorted({window and CHECKED_WINDOW for window in shape.windows}, key=bool)
        ]
    except Exception as failure:  # a package of another version, or for another torch
        return None, f"{name} failed its check ({type(failure).__name__}: {failure})"
    if not all(error < provider.allowed for error in errors):
        found = ", ".join(f"{error:.2g}" for error in errors)
        return None, f"{name} does not agree with Triton here (relative error {found})"
    return theirs, f"{name} {provider.serving}"


def _difference(
    theirs: ProvidedAttention, ours: Attend, q: Tensor, pool: Tensor, inputs: AttentionInputs
) -> float:
    assert theirs.serves(q, pool, inputs)
    expected = ours(q, pool, 1, inputs).float()
    return float((theirs(q, pool, 1, inputs).float() - expected).norm() / expected.norm())


def _case(
    provider: Provider, device: torch.device, shape: AttentionShape, window: int | None
) -> tuple[Tensor, Tensor, AttentionInputs]:
    """Over a pool of two layers; each sequence's queries are its last tokens."""
    blocks = [-(-length // shape.block_size) for length in provider.lengths]
    random, heads, kv_heads = torch.Generator().manual_seed(0), shape.num_heads, shape.num_kv_heads
    size = (sum(blocks), 2, 2, kv_heads, shape.block_size, shape.head_dim)
    pool = torch.randn(size, generator=random).to(provider.cache)
    wide = torch.randn((sum(provider.queries), heads + 2 * kv_heads, shape.head_dim), generator=random)
    tables = torch.zeros((len(blocks), max(blocks)), dtype=torch.int32)
    numbers = torch.randperm(sum(blocks), generator=random)
    for row, count in enumerate(blocks):
        tables[row, :count], numbers = numbers[:count].int(), numbers[count:]
    scales = torch.tensor([[1.0, 1.0], [0.5, 2.0]])[:, :, None].expand(2, 2, kv_heads).contiguous()
    inputs = AttentionInputs(
        torch.tensor([0, *provider.queries]).cumsum(0).int().to(device),
        torch.tensor(provider.lengths, dtype=torch.int32).to(device),
        tables.to(device),
        shape.head_dim**-0.5,
        window,
        kv_scales=scales.to(device) if provider.cache == FLOAT8 else None,
        max_query_len=max(provider.queries),
    )
    return wide.to(torch.bfloat16).to(device)[:, :heads], pool.to(device), inputs
