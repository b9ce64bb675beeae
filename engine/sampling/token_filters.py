"""min-p, top-k and top-p, each as one threshold below which a row's logits become -inf.

A threshold keeps every token that ties with the last one kept, so the outcome does not depend on a sort's
order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

FIRST_LOOK = (
    256  # most distributions hold their top-p in fewer tokens than this: no need to sort the whole vocabulary
)


class FilterParams(NamedTuple):
    top_k: int
    top_p: float
    min_p: float


def keep_likely_tokens(row: Tensor, params: FilterParams) -> None:
    """Filter one row of logits [vocab_size] in place, after temperature: min-p, then top-k, then top-p."""
    if params.min_p > 0:
        row[row < row.max() + math.log(params.min_p)] = -torch.inf
    top_k = params.top_k if 0 < params.top_k < row.numel() else row.numel()
    if params.top_p >= 1.0:
        if top_k < row.numel():
            row[row < row.topk(top_k).values[-1]] = -torch.inf
        return
    row[row < _top_p_threshold(row, top_k, params.top_p)] = -torch.inf


def _top_p_threshold(row: Tensor, top_k: int, top_p: float) -> Tensor:
    """The logit of the last token of the smallest set whose probability reaches top_p. (A copy of the row
    lies at the same alignment whatever row of the batch it is: torch's sums depend on it.)"""
    count = min(FIRST_LOOK, top_k)
    while True:
        likely = row.topk(count).values
        norm = (
            likely if count == top_k else row.clone() if top_k == row.numel() else row.topk(top_k).values
        ).logsumexp(0)
        reached = (likely - norm).exp().cumsum(0) >= top_p
        if reached[-1]:
            return likely[reached.to(torch.uint8).argmax()]
        if count == top_k:  # rounding: the whole set sums to slightly less than top_p
            return likely[-1]
        count = min(count * 16, top_k)
