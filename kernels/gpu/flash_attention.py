"""FlashAttention-3 for steps with chunks of prompts, where its package is installed
(``flash_attn_interface``, of Dao-AILab/flash-attention, folder hopper) and its answers agree with Triton's at
start.

It computes decode rows of the step, too. It needs the longest chunk's length, which the host knows of a step
that it launches. Triton computes captured steps, exact ones, and those over a float8 cache. (Shah et al.,
FlashAttention-3, 2024.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..interface import AttentionInputs

CAPABILITY = 9  # Hopper
ALLOWED_ERROR = 0.01  # relative, of bfloat16
BLOCK_SIZE = 64  # tokens, of the self-check
Attend = Callable[[Tensor, Tensor, int, AttentionInputs], Tensor]


class FlashAttention3:
    """``call``: the package's ``flash_attn_with_kvcache``."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def serves(self, q: Tensor, pool: Tensor, inputs: AttentionInputs) -> bool:
        """Whether some sequence has several queries, in a 16-bit type that the cache shares."""
        return (inputs.max_query_len or 1) > 1 and q.dtype == pool.dtype and q.itemsize == 2

    def __call__(self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs) -> Tensor:
        """See ``Kernels.paged_attention``. The package wants [num_blocks, block_size, num_kv_heads, head_dim]
        of keys and of values, in any strides with contiguous heads."""
        keys, values = pool[:, layer, 0].transpose(1, 2), pool[:, layer, 1].transpose(1, 2)
        window = inputs.sliding_window
        out = self._call(
            q,
            keys,
            values,
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


def usable_flash_attention(device: torch.device, ours: Attend) -> tuple[FlashAttention3 | None, str]:
    """It and what to log; None where the package is missing, the GPU is none of its kind, or its answers are
    not those of ``ours``."""
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except (ImportError, OSError) as missing:
        return None, f"FlashAttention-3 is not installed ({str(missing).splitlines()[0]})"
    if torch.cuda.get_device_capability(device)[0] != CAPABILITY:
        return None, "FlashAttention-3 is for Hopper GPUs"
    theirs = FlashAttention3(flash_attn_with_kvcache)
    try:
        for window in (None, 40):
            q, pool, inputs = _case(device, window)
            expected = ours(q, pool, 1, inputs).float()
            differs = float((theirs(q, pool, 1, inputs).float() - expected).norm() / expected.norm())
            if not differs < ALLOWED_ERROR:
                return (
                    None,
                    f"FlashAttention-3 does not agree with Triton here (relative error {differs:.2g})",
                )
    except Exception as failure:  # a package of another version, or for another torch
        return None, f"FlashAttention-3 failed its check ({type(failure).__name__}: {failure})"
    return theirs, "FlashAttention-3 for steps with prompts"


def _case(device: torch.device, window: int | None) -> tuple[Tensor, Tensor, AttentionInputs]:
    """A decode row, a chunk after cached tokens, and a prompt, over a pool of two layers."""
    queries, lengths, heads, kv_heads, head_dim = (1, 20, 70), (90, 150, 70), 4, 2, 128
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    shape = (sum(blocks), 2, 2, kv_heads, BLOCK_SIZE, head_dim)
    random = torch.Generator().manual_seed(0)
    pool = torch.randn(shape, generator=random).to(torch.bfloat16)
    wide = torch.randn((sum(queries), heads + 2 * kv_heads, head_dim), generator=random).to(torch.bfloat16)
    tables, numbers = torch.zeros((3, max(blocks)), dtype=torch.int32), torch.randperm(sum(blocks))
    for row, count in enumerate(blocks):
        tables[row, :count], numbers = numbers[:count].int(), numbers[count:]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    lens = torch.tensor(lengths, dtype=torch.int32)
    inputs = AttentionInputs(
        starts.to(device), lens.to(device), tables.to(device), head_dim**-0.5, window,
        max_query_len=max(queries),
    )  # fmt: skip
    return wide.to(device)[:, :heads], pool.to(device), inputs
