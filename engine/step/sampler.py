"""Chooses one token a sequence from its logits.

The order is: the grammar's mask, logit_bias and min_tokens, penalties, (greedy rows end here), temperature,
min-p, top-k, top-p, noise. Penalties follow OpenAI and vLLM: repetition looks at prompt and output, presence
and frequency at the output. Logprobs are those of the model's own distribution, before all of these. Every
row depends on its own state only: never on the batch. (torch's sums and exponentials round by where in memory
a value lies, so a row that needs them is copied out first.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.gumbel_noise import noise_key
from ...kernels.interface import HostKernels
from ...transport.messages.images import FIRST_IMAGE_ID
from ...transport.messages.messages import TokenLogprobs
from .batch import Batch, SamplingState

FIRST_LOOK = 256
"""Most distributions hold their top-p in fewer tokens than this: no need to sort the whole vocabulary."""
LOGPROB_ROWS = 64  # logits of this many prompt tokens are held at a time


@dataclass(frozen=True, slots=True)
class SampledRows:
    """One entry a row of logits; n rows.

    positions int32 [n]  of the token to be sampled
    newest    int32 [n]  the token before it, on the logits' device: the states may not have it yet
    device_positions     ``positions`` on the device, where they are there
    read_newest          returns ``newest`` on the host, and waits for the step before where that samples them
    """

    states: Sequence[SamplingState]
    positions: NDArray[np.int32]
    newest: Tensor
    read_newest: Callable[[], NDArray[np.int32]]
    device_positions: Tensor | None = None

    @property
    def constrained(self) -> list[int]:
        """The rows that follow a grammar."""
        return [row for row, state in enumerate(self.states) if state.matcher is not None]

    def write_masks(self, masks: NDArray[np.int32]) -> None:
        """Fill ``masks`` [len(constrained), num_words] with the bits of the tokens that may follow, as
        ``TokenMatcher.mask`` has them."""
        newest = self.read_newest()
        for words, row in zip(masks, self.constrained, strict=True):
            state = self.states[row]
            assert state.matcher is not None
            words[:] = state.matcher.mask(state.outputs_before(int(self.positions[row]), int(newest[row])))


class StepLogits(NamedTuple):
    """What a step has computed for the n sequences that sample, on its device.

    logits  float32 [n, vocab_size]
    newest  int32 [n]      their last input tokens
    lengths int32 [n]      of their sequences
    which   int64 [n]      their numbers in the batch; None: all of it, in order
    """

    logits: Tensor
    newest: Tensor
    lengths: Tensor
    which: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, newest: Tensor, seq_lens: Tensor, which: Tensor) -> StepLogits:
        """``seq_lens``: of all sequences of the batch."""
        if len(which) == len(seq_lens):
            return cls(logits, newest, seq_lens)
        return cls(logits, newest, seq_lens[which], which)


class Sampler:
    def __init__(self, kernels: HostKernels, eos_token_ids: tuple[int, ...]) -> None:
        self._kernels = kernels
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: Tensor, rows: SampledRows) -> tuple[NDArray[np.int32], dict[int, TokenLogprobs]]:
        """``logits`` float32 [num_rows, vocab_size] are overwritten. Token ids [num_rows] and, by row, the
        logprobs asked for."""
        states = rows.states
        if all(state.plain_greedy for state in states):
            return logits.numpy().argmax(-1).astype(np.int32), {}
        reporting = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        raw = logits[reporting] if reporting else logits
        forbid_tokens(logits, rows)
        for row, state in enumerate(states):
            if not state.plain_greedy:
                self._edit(logits[row], state, int(rows.positions[row]), int(rows.newest[row]))
        chosen = logits.argmax(dim=-1)
        random = [row for row, state in enumerate(states) if not state.is_greedy(logits.shape[1])]
        if random:
            chosen[random] = self._draw(
                logits[random], [states[row] for row in random], rows.positions[random].tolist()
            )
        token_ids = _to_numpy(chosen)
        counts = [states[row].params.logprobs or 0 for row in reporting]
        asked = [states[row].params.logprob_token_ids for row in reporting]
        chosen_ids = [int(token_ids[row]) for row in reporting]
        logprobs_of_rows = report_logprobs(raw, chosen_ids, counts, asked) if reporting else []
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


def report_logprobs(
    logits: Tensor, chosen: Sequence[int], counts: Sequence[int], asked: Sequence[Sequence[int]] | None = None
) -> list[TokenLogprobs]:
    """For each row of ``logits`` [n, vocab_size]: the chosen token's logprob and those of the tokens
    ``asked[row]`` or, without any, of the ``counts[row]`` most likely ones."""
    rows = zip(logits, chosen, counts, asked or [()] * len(counts), strict=True)
    return [_report_row(row.clone(), token, count, ids) for row, token, count, ids in rows]


def prompt_logprobs(
    batch: Batch, reported: Sequence[int], hidden: Tensor, logits_of: Callable[[Tensor], Tensor], rank: int
) -> dict[int, list[TokenLogprobs]]:
    """Return the logprobs of ``next_prompt_ids`` of the sequences ``reported``, on rank 0. ``hidden``: states
    [n, E] of these tokens, one sequence after the other."""
    by_row: dict[int, list[TokenLogprobs]] = {}
    for i in reported:
        ids, count = batch.next_prompt_ids[i], batch.prompt_logprobs[i] or 0
        by_row[i] = []
        for start in range(0, len(ids), LOGPROB_ROWS):
            next_ids = ids[start : start + LOGPROB_ROWS]
            logits = logits_of(hidden[start : start + len(next_ids)])
            if rank == 0:
                by_row[i] += report_logprobs(logits, next_ids, [count] * len(next_ids))
        hidden = hidden[len(ids) :]
    return by_row


def _report_row(row: Tensor, token: int, count: int, asked: Sequence[int]) -> TokenLogprobs:
    norm = row.logsumexp(0)
    own = float(row[token] - norm)
    if asked:
        return TokenLogprobs(own, tuple(asked), tuple((row[list(asked)] - norm).tolist()))
    if count == 0:
        return TokenLogprobs(own)
    top = row.topk(count)
    return TokenLogprobs(own, tuple(top.indices.tolist()), tuple((top.values - norm).tolist()))


def distinct_words(token_ids: Sequence[int]) -> NDArray[np.int64]:
    """int64: each id once, without those of images."""
    ids = np.unique(np.array(token_ids, np.int64))
    return ids[ids < FIRST_IMAGE_ID]


def _penalize_repetition(row: Tensor, token_ids: Sequence[int], penalty: float) -> None:
    """Keskar et al., CTRL, 2019: a seen token's logit is divided by the penalty where positive, multiplied
    where negative."""
    seen = torch.from_numpy(distinct_words(token_ids)).to(row.device)
    logits = row[seen]
    row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)


def _to_numpy(token_ids: Tensor) -> NDArray[np.int32]:
    result: NDArray[np.int32] = token_ids.to("cpu", torch.int32).numpy()
    return result


class FilterParams(NamedTuple):
    top_k: int
    top_p: float
    min_p: float


def keep_likely_tokens(row: Tensor, params: FilterParams) -> None:
    """Filter one row of logits [vocab_size] in place, after temperature: min-p, then top-k, then top-p.

    Each is one threshold below which logits become -inf. Tokens that tie with the last one kept are kept, so
    that the outcome does not depend on a sort's order."""
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


def forbid_tokens(logits: Tensor, rows: SampledRows) -> None:
    """Set logits float [num_rows, vocab_size] of tokens that a row's grammar does not allow to -inf, in
    place, on a CPU."""
    constrained = rows.constrained
    if not constrained:
        return
    words = np.zeros((len(constrained), -(-logits.shape[1] // 32)), np.int32)
    rows.write_masks(words)
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
    logits[constrained] = logits[constrained].masked_fill(torch.from_numpy(allowed == 0), -torch.inf)
