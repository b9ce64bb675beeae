"""A step between its last layer and its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...transport.messages.messages import TokenLogprobs
from ..device import bring
from .batch import Batch
from .next_drafts import StepHidden
from .sampler import StepLogits

NO_LOGPROBS: dict[int, list[TokenLogprobs]] = {}
Embeddings = Callable[[], dict[int, NDArray[np.float32]]]
NO_EMBEDDINGS: Embeddings = dict


class ComputedStep(NamedTuple):
    """A step before it samples: the sequences that do, what from, and all tokens' hidden states where those
    are there; the logprobs of prompts; and a call that waits for embeddings."""

    sampled: list[int]
    logits: StepLogits
    hidden: StepHidden | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs]] = NO_LOGPROBS
    embeddings: Embeddings = NO_EMBEDDINGS


def embeddings_of(
    batch: Batch, rows: Sequence[int], hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> Embeddings:
    """Return a call that waits for the ``Batch.embeds`` of these rows, and has them by row. ``hidden``
    [len(rows), E]: their last tokens' states."""
    if not rows:
        return NO_EMBEDDINGS
    wanted = [batch.embeds[row] or () for row in rows]
    found = list(hidden.to(torch.float32, copy=True))
    if scored := [i for i, token_ids in enumerate(wanted) if token_ids]:
        logits = logits_of(hidden[scored])
        for i, of_row in zip(scored, logits, strict=True):
            found[i] = of_row[list(wanted[i])].to(torch.float32)
    arrived = bring(found)
    return lambda: dict(zip(rows, (vector.numpy() for vector in arrived()), strict=True))


def no_tokens(
    num_seqs: int, passed: Callable[[], None]
) -> Callable[[], tuple[NDArray[np.int32], dict[int, TokenLogprobs]]]:
    def tokens() -> tuple[NDArray[np.int32], dict[int, TokenLogprobs]]:
        passed()
        return np.full(num_seqs, -1, np.int32), {}

    return tokens
