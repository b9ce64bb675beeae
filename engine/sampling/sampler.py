"""Chooses one token a sequence from its logits.

The order is: the grammar's mask, logit_bias and min_tokens, penalties, (greedy rows end here), temperature,
min-p, top-k, top-p, noise. Penalties follow OpenAI and vLLM: repetition looks at prompt and output, presence
and frequency at the output. Logprobs are those of the model's own distribution, before all of these. Every
row depends on its own state only: never on the batch. (torch's sums and exponentials round by where in memory
a value lies, so a row that needs them is copied out first.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.gumbel_noise import noise_key
from ...kernels.interface import Kernels
from ..step.batch import Logprobs, SamplingState
from .sampled_rows import SampledRows
from .token_filters import FilterParams, keep_likely_tokens
from .token_masks import forbid_tokens


class Sampler:
    def __init__(self, kernels: Kernels, eos_token_ids: tuple[int, ...]) -> None:
        self._kernels = kernels
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: Tensor, rows: SampledRows) -> tuple[NDArray[np.int32], dict[int, Logprobs]]:
        """``logits`` float32 [num_rows, vocab_size] are overwritten. Token ids [num_rows] and, by row, the
        logprobs asked for."""
        states = rows.states
        if all(state.plain_greedy for state in states):
            return _to_numpy(logits.argmax(dim=-1)), {}
        reporting = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        raw = logits[reporting] if reporting else logits
        forbid_tokens(logits, states)
        for row, state in enumerate(states):
            if not state.plain_greedy:
                self._edit(logits[row], state, int(rows.positions[row]), int(rows.newest[row]))
        chosen = logits.argmax(dim=-1)
        random = [row for row, state in enumerate(states) if state.params.temperature > 0]
        if random:
            chosen[random] = self._draw(
                logits[random], [states[row] for row in random], rows.positions[random].tolist()
            )
        token_ids = _to_numpy(chosen)
        counts = [states[row].params.logprobs or 0 for row in reporting]
        logprobs_of_rows = (
            report_logprobs(raw, [int(token_ids[row]) for row in reporting], counts) if reporting else []
        )
        return token_ids, dict(zip(reporting, logprobs_of_rows, strict=True))

    def _edit(self, row: Tensor, state: SamplingState, position: int, newest: int) -> None:
        """Everything that looks at single tokens, in place on one row's logits [vocab_size]."""
        p = state.params
        if p.logit_bias:
            ids = torch.tensor(list(p.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(p.logit_bias.values()), dtype=row.dtype, device=row.device)
        if state.num_outputs_before(position) < p.min_tokens:
            row[
                torch.tensor([*self._eos_token_ids, *p.stop_token_ids], dtype=torch.int64, device=row.device)
            ] = -torch.inf
        output = state.outputs_before(position, newest) if p.has_penalties else []
        if p.repetition_penalty != 1:
            _penalize_repetition(row, [*state.prompt_token_ids, *output], p.repetition_penalty)
        if output and (p.presence_penalty or p.frequency_penalty):
            counted = Counter(output)
            ids = torch.tensor(list(counted), device=row.device)
            counts = torch.tensor(list(counted.values()), dtype=row.dtype, device=row.device)
            row[ids] -= p.presence_penalty + p.frequency_penalty * counts

    def _draw(self, logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> Tensor:
        """A sample of each row's softmax(logits / temperature), filtered. logits [n, vocab_size], the
        caller's to lose."""
        temperatures = torch.tensor([state.params.temperature for state in states], device=logits.device)
        logits /= temperatures.unsqueeze(1)
        for row, state in enumerate(states):
            keep_likely_tokens(
                logits[row], FilterParams(state.params.top_k, state.params.top_p, state.params.min_p)
            )
        keys = [
            noise_key(state.params.seed, position) for state, position in zip(states, positions, strict=True)
        ]
        return self._kernels.gumbel_argmax(
            logits, torch.tensor(keys, dtype=torch.int64, device=logits.device)
        )


def report_logprobs(logits: Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """For each row of ``logits`` [n, vocab_size]: the chosen token's logprob and the ``counts[row]`` most
    likely tokens."""
    return [
        _report_row(row.clone(), token, count)
        for row, token, count in zip(logits, chosen, counts, strict=True)
    ]


def _report_row(row: Tensor, token: int, count: int) -> Logprobs:
    norm = row.logsumexp(0)
    own = float(row[token] - norm)
    if count == 0:
        return Logprobs(own)
    top = row.topk(count)
    return Logprobs(own, tuple(top.indices.tolist()), tuple((top.values - norm).tolist()))


def _penalize_repetition(row: Tensor, token_ids: Sequence[int], penalty: float) -> None:
    """Keskar et al., CTRL, 2019: a seen token's logit is divided by the penalty where positive, multiplied
    where negative."""
    seen = torch.from_numpy(np.unique(np.array(token_ids, dtype=np.int64))).to(row.device)
    logits = row[seen]
    row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)


def _to_numpy(token_ids: Tensor) -> NDArray[np.int32]:
    result: NDArray[np.int32] = token_ids.to("cpu", torch.int32).numpy()
    return result
