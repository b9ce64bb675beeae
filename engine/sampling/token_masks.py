"""Grammars' masks on a step's logits, on whichever device these are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..step.batch import SamplingState


def forbid_tokens(logits: Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Logits float [num_rows, vocab_size] of tokens that a row's grammar does not allow become -inf in place.
    Returns those rows."""
    rows = [row for row, state in enumerate(states) if state.matcher is not None]
    if not rows:
        return rows
    words = np.stack(
        [
            matcher.mask(states[row].output_token_ids)
            for row in rows
            if (matcher := states[row].matcher) is not None
        ]
    )
    octets = torch.from_numpy(words.view(np.uint8)).to(logits.device)  # [n, ceil(vocab_size / 32) * 4]
    bits = (octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    return rows
