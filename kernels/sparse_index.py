"""The index of DeepSeek's sparse attention (DeepSeek-V3.2-Exp, 2025, equation 1) in torch: a token attends to
the ``count`` tokens before it, or itself, whose scores are largest.

    score of key t = sum over heads h of weight[h] max(0, q[h] . key[t])

Of equal scores the first tokens are chosen, whatever the batch. The published software also rounds queries
and keys to float8 behind a Hadamard transform, which changes no product but by that rounding; here they are
in the model's type, as transformers has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .interface import AttentionInputs


def index_slots(
    q: Tensor, weights: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs, count: int
) -> Tensor:
    """See ``interface.Kernels``."""
    block_size, starts = pool.shape[4], inputs.query_start_loc.tolist()
    chosen = torch.empty(len(q), count, dtype=torch.int32, device=q.device)
    for i, length in enumerate(inputs.seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        blocks = inputs.block_tables[i, : -(-length // block_size)].long()
        keys = pool[blocks, layer, 0, 0].flatten(0, 1)[:length].float()
        scores = torch.einsum("thk,th->tk", (q[rows].float() @ keys.t()).relu(), weights[rows])
        positions = torch.arange(length, device=q.device)
        last = positions[length - len(scores) :, None]
        scores = scores.masked_fill(positions > last, -torch.inf)
        slots = (blocks[:, None] * block_size + torch.arange(block_size, device=q.device)).flatten()
        chosen[rows] = slots[largest(scores, count)].int()
    return chosen


def largest(scores: Tensor, count: int) -> Tensor:
    """The places of each row's ``count`` largest numbers, ascending; of equal ones the first. int64 [n,
    count]. NaN is as infinity: a sequence that has some fails no other."""
    scores = scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
    least = scores.topk(count).values[:, -1:]
    above, equal = scores > least, scores == least
    left = count - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= left))
    return taken.nonzero()[:, 1].view(-1, count)
