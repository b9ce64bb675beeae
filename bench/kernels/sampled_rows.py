"""Rows to sample for, outside of a model runner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine.step.batch import SamplingState
from ...engine.step.device_sampler import DeviceSampler
from ...engine.step.sampler import SampledRows
from ...transport.messages.messages import TokenLogprobs


def booked(states: Sequence[SamplingState], device: torch.device | str = "cpu") -> SampledRows:
    """Return the rows of sequences without a token under way."""
    newest = [[*s.prompt_token_ids, *s.output_token_ids][-1] if s.position else 0 for s in states]
    positions = np.array([s.position for s in states], np.int32)
    on_host = np.array(newest, np.int32)
    return SampledRows(states, positions, torch.from_numpy(on_host).to(device), lambda: on_host)


def drawn(
    sampler: DeviceSampler, logits: Tensor, rows: SampledRows
) -> tuple[NDArray[np.int32], dict[int, TokenLogprobs]]:
    """Draw, and wait for the tokens and the logprobs."""
    chosen, read_logprobs = sampler.draw(logits, rows)
    return chosen.cpu().numpy(), read_logprobs()
