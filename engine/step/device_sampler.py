"""The sampler where the logits lie on a GPU: all rows at once, by the kernels of kernels/gpu/sampling.py, and
one wait at the end.

What a row is asked for comes from the same ``SamplingState`` as in sampler.py, and means the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.gpu.sampling import IN_PROMPT, SamplingRows, sample
from ...kernels.gpu.token_masks import forbid
from ...kernels.gumbel_noise import hashed_seed
from ...transport.messages.messages import TokenLogprobs
from ..device import bring, send
from .batch import SamplingState
from .sampler import SampledRows


class DeviceSampler:
    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._last: _LastRows | None = None

    def sample(
        self, logits: Tensor, sampled: SampledRows
    ) -> tuple[NDArray[np.int32], dict[int, TokenLogprobs]]:
        """``logits`` float32 [num_rows, vocab_size] are overwritten. Token ids [num_rows] and, by row, the
        logprobs asked for."""
        chosen, read_logprobs = self.draw(logits, sampled)
        return chosen.cpu().numpy(), read_logprobs()

    def draw(
        self, logits: Tensor, sampled: SampledRows
    ) -> tuple[Tensor, Callable[[], dict[int, TokenLogprobs]]]:
        """As ``sample``, without waiting: token ids int32 on the device, and a call that waits for the
        logprobs."""
        states, rows = sampled.states, self._rows(sampled, logits.shape[1])
        reporting = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        constrained = sampled.constrained
        raw = logits.clone() if any(states[row].matcher is not None for row in reporting) else logits
        if constrained:
            forbid(logits, _token_masks(sampled, constrained, logits))
        if raw is not logits:
            chosen, _ = sample(logits, rows)
            own = raw.gather(1, chosen.unsqueeze(1)).squeeze(1) - raw.logsumexp(-1)
        else:
            chosen, own = sample(logits, rows)
        if not reporting:
            return chosen.int(), dict
        counts = [states[row].params.logprobs or 0 for row in reporting]
        which = send(torch.tensor(reporting), logits.device)  # a list as an index would wait for the device
        raw, own = raw.index_select(0, which), own.index_select(0, which)
        norms = raw.gather(1, chosen.index_select(0, which).unsqueeze(1)) - own.unsqueeze(1)
        top = raw.topk(max(counts), dim=-1)
        arrived = bring([own, top.indices, top.values - norms])

        def read_logprobs() -> dict[int, TokenLogprobs]:
            chosen_logprobs, ids, values = (column.tolist() for column in arrived())
            return dict(zip(reporting, _report(chosen_logprobs, ids, values, counts), strict=True))

        return chosen.int(), read_logprobs

    def _rows(self, sampled: SampledRows, vocab_size: int) -> SamplingRows:
        """What the rows ask for. As long as the same sequences run it stays on the device, where the chosen
        tokens are counted."""
        if self._last is not None and self._last.is_before(sampled):
            rows = replace(self._last.rows, positions=_positions(sampled))
        else:
            rows = sampling_rows(sampled, self._eos_token_ids, vocab_size)
        self._last = _LastRows(list(sampled.states), sampled.positions.copy(), rows)
        return rows


def _token_masks(sampled: SampledRows, constrained: Sequence[int], logits: Tensor) -> Tensor:
    """What ``forbid`` reads. The step that computes ``logits`` is under way: the host waits for the tokens of
    the step before and finds the masks meanwhile, the device waits only for their copy."""
    on_gpu = logits.is_cuda
    shape = (len(constrained), 1 + -(-logits.shape[1] // 32))
    masks = (
        torch.empty(shape, dtype=torch.int32, pin_memory=True)
        if on_gpu
        else torch.zeros(shape, dtype=torch.int32)
    )
    words = masks.numpy()
    words[:, 0] = constrained
    sampled.write_masks(words[:, 1:])
    return masks.to(logits.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _LastRows:
    """What the last step sampled by."""

    states: list[SamplingState]
    positions: NDArray[np.int32]
    rows: SamplingRows

    def is_before(self, sampled: SampledRows) -> bool:
        """Only the positions of ``rows`` need to change for ``sampled``. Where tokens are counted, a step
        that is run again must not find its own token counted."""
        if len(self.states) != len(sampled.states) or not all(map(operator.is_, self.states, sampled.states)):
            return False
        return not self.rows.edited or np.array_equal(sampled.positions, self.positions + 1)


def _report(
    own: list[float], ids: list[list[int]], values: list[list[float]], counts: list[int]
) -> list[TokenLogprobs]:
    return [TokenLogprobs(own[i], tuple(ids[i][:n]), tuple(values[i][:n])) for i, n in enumerate(counts)]


def sampling_rows(sampled: SampledRows, eos_token_ids: tuple[int, ...], vocab_size: int) -> SamplingRows:
    """What these sequences ask for, on the device of their newest tokens. Token counts are made for those
    that have penalties."""
    device = sampled.newest.device
    params = [state.params for state in sampled.states]
    greedy = [state.is_greedy(vocab_size) for state in sampled.states]
    penalized = [row for row, p in enumerate(params) if p.has_penalties]
    slots = {row: slot for slot, row in enumerate(penalized)}
    edits = [
        _edits(state, int(at), eos_token_ids)
        for state, at in zip(sampled.states, sampled.positions, strict=True)
    ]
    flat = [(token, *edit) for row in edits for token, edit in row.items()]

    def column(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return send(torch.tensor(values, dtype=dtype), device)

    return SamplingRows(
        hashed_seeds=column([hashed_seed(p.seed) for p in params], torch.int64),
        positions=_positions(sampled),
        temperatures=column(
            [p.temperature * (not g) for p, g in zip(params, greedy, strict=True)], torch.float32
        ),
        top_k=column([p.top_k for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
        repetition=column([p.repetition_penalty for p in params], torch.float32),
        presence=column([p.presence_penalty for p in params], torch.float32),
        frequency=column([p.frequency_penalty for p in params], torch.float32),
        count_slots=column([slots.get(row, -1) for row in range(len(params))], torch.int32),
        token_counts=_token_counts(sampled, penalized, vocab_size),
        edit_start=column(np.cumsum([0, *(len(row) for row in edits)]).tolist(), torch.int32),
        edit_tokens=column([edit[0] for edit in flat], torch.int32),
        edit_banned_until=column([edit[1] for edit in flat], torch.int32),
        edit_bias=column([edit[2] for edit in flat], torch.float32),
        edited=bool(penalized or flat),
        filtered=any(
            not g and (p.min_p > 0 or p.top_p < 1 or p.top_k > 0) for p, g in zip(params, greedy, strict=True)
        ),
    )


def _positions(sampled: SampledRows) -> Tensor:
    if sampled.device_positions is not None:
        return sampled.device_positions
    return send(torch.from_numpy(sampled.positions), sampled.newest.device)


def _edits(
    state: SamplingState, position: int, eos_token_ids: tuple[int, ...]
) -> dict[int, tuple[int, float]]:
    """By token: the position until which it is banned, and its bias."""
    edits = {token: (0, bias) for token, bias in state.params.logit_bias.items()}
    until = len(state.prompt_token_ids) + state.params.min_tokens
    if state.num_outputs_before(position) < state.params.min_tokens:
        for token in (*eos_token_ids, *state.params.stop_token_ids):
            edits[token] = (until, edits.get(token, (0, 0.0))[1])
    return edits


def _token_counts(sampled: SampledRows, penalized: Sequence[int], vocab_size: int) -> Tensor:
    """int32 [max(1, len(penalized)), vocab_size], as ``SamplingRows`` has it. The newest token is added on
    the device: the host may not know it yet."""
    newest, device = sampled.newest, sampled.newest.device
    counts = torch.zeros((max(1, len(penalized)), vocab_size), dtype=torch.int32, device=device)
    for slot, row in enumerate(penalized):
        state, count = (
            sampled.states[row],
            sampled.states[row].num_outputs_before(int(sampled.positions[row])),
        )
        prompt = np.unique(np.array(state.prompt_token_ids, np.int64))
        generated, times = np.unique(
            np.array(state.output_token_ids[: max(0, count - 1)], np.int64), return_counts=True
        )
        counts[slot].index_fill_(0, send(torch.from_numpy(prompt), device), IN_PROMPT)
        counts[slot].index_add_(
            0,
            send(torch.from_numpy(generated), device),
            send(torch.from_numpy(times.astype(np.int32)), device),
        )
        if count:
            counts[slot].index_add_(0, newest[row : row + 1], torch.ones(1, dtype=torch.int32, device=device))
    return counts
