"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1), absorbed: attention runs over the latent
vectors that the cache holds, as if all heads shared one key that is its value, too.

    score of head h = q_plain . (K[h] c) + q_rotated . k_rotated, the first term as (K[h]^T q_plain) . c
    value of head h = V[h] (sum of weight c), of each token's latent vector c

A token's numbers in the cache, and those of a head's query, are in the order [first of the rotated pairs,
half of the latent vector, second of the pairs, its other half]: rope turns number i with number i + half
(``rope.py``). The products with K and V are a call for each head: a row's bits do not depend on its batch.
K and V are in the model's type, whatever the checkpoint or ``--quantization`` makes of the other weights.

T: num_tokens, H: num_heads, R: rank, D: rotated + R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .latent_config import ATTENTION, LatentConfig
from .layers import LayerLoader

EPS = 1e-6  # of the inner norms; config.json's is of the others


class LatentAttention:
    def __init__(self, config: LatentConfig, layer: str, load: LayerLoader, interleaved: bool) -> None:
        c, name = config, f"{layer}.{ATTENTION}"
        self._config, self._kernels, self._interleaved = config, load.kernels, interleaved
        self._q_a = self._q_a_norm = None
        if c.query_rank:
            self._q_a = load.row(f"{name}.q_a_proj", c.bias)
            self._q_a_norm = load.norm(f"{name}.q_a_layernorm")
        self._q = load.row(f"{name}.{'q_b_proj' if c.query_rank else 'q_proj'}", False)
        self._kv_a = load.row(f"{name}.kv_a_proj_with_mqa", c.bias)
        self._kv_a_norm = load.norm(f"{name}.kv_a_layernorm")
        heads = load.weight(f"{name}.kv_b_proj").view(c.num_heads, c.plain + c.value, c.rank)
        self._keys = [load.kernels.linear(head[: c.plain].t().contiguous(), None, True) for head in heads]
        self._values = [load.kernels.linear(head[c.plain :].contiguous(), None, True) for head in heads]
        self._o = load.row(f"{name}.o_proj", c.bias)

    def queries_and_key(self, x: Tensor) -> Tensor:
        """x [T, hidden_size] -> [T, (H + 1) D], before rope."""
        c, num_tokens = self._config, len(x)
        of = x
        if self._q_a is not None and self._q_a_norm is not None:
            of = self._kernels.rms_norm(self._q_a(x), self._q_a_norm, EPS)
        q = self._q(of).view(num_tokens, c.num_heads, c.plain + c.rotated).transpose(0, 1)
        plain = q[..., : c.plain].contiguous()
        latent = torch.stack([key(head) for key, head in zip(self._keys, plain, strict=True)])
        queries = self._in_order(q[..., c.plain :], latent).transpose(0, 1)  # [T, H, D]
        kv = self._kv_a(x)
        normed = self._kernels.rms_norm(kv[:, : c.rank].contiguous(), self._kv_a_norm, EPS)
        key = self._in_order(kv[:, c.rank :], normed)
        return torch.cat((queries, key[:, None]), dim=1).flatten(1)

    def output(self, x: Tensor) -> Tensor:
        """Sums over keys [T, H D] -> [T, hidden_size]."""
        c = self._config
        first, half = c.rotated // 2, c.cached // 2
        sums = x.view(len(x), c.num_heads, c.cached)
        latent = torch.cat((sums[..., first:half], sums[..., half + first :]), dim=-1)
        by_head = latent.transpose(0, 1).contiguous()  # [H, T, R]
        values = [value(head) for value, head in zip(self._values, by_head, strict=True)]
        return self._o(torch.cat(values, dim=-1))

    def _in_order(self, rotated: Tensor, latent: Tensor) -> Tensor:
        """[..., rotated] and [..., R] -> [..., D]."""
        if self._interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        else:
            first, second = rotated.chunk(2, dim=-1)
        left, right = latent.chunk(2, dim=-1)
        return torch.cat((first, left, second, right), dim=-1)
