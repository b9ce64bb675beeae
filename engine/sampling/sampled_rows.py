"""The rows whose logits a sampler gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..step.batch import SamplingState


@dataclass(frozen=True, slots=True)
class SampledRows:
    """One entry a row of logits; n rows.

    positions int32 [n]  of the token to be sampled
    newest    int32 [n]  the token before it, on the logits' device: the states may not have it yet
    """

    states: Sequence[SamplingState]
    positions: NDArray[np.int32]
    newest: Tensor

    @classmethod
    def booked(cls, states: Sequence[SamplingState], device: torch.device | str = "cpu") -> SampledRows:
        """Rows of sequences without a token under way."""
        newest = [[*s.prompt_token_ids, *s.output_token_ids][-1] if s.position else 0 for s in states]
        positions = np.array([s.position for s in states], np.int32)
        return cls(states, positions, torch.tensor(newest, dtype=torch.int32, device=device))
