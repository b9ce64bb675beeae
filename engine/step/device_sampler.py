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
from ..device import bring, send, send_all
from .batch import SamplingState
from .sampler import SampledRows, distinct_words


class DeviceSampler:
    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids
        self._last: _LastRows | None = None

    def draw(
        self, logits: Tensor, sampled: SampledRows
    ) -> tuple[Tensor, Callable[[], dict[int, TokenLogprobs]]]:
        """``logits`` float32 [num_rows, vocab_size] are overwritten. Token ids int32 [num_rows] on the
        device, and a call that waits for the logprobs asked for, by row."""
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
        asked = [states[row].params.logprob_token_ids for row in reporting]
        counts = [len(asked[i]) or states[row].params.logprobs or 0 for i, row in enumerate(reporting)]
        which = rows.reporting  # a list as an index would wait for the device
        assert which is not None
        raw, own = raw.index_select(0, which), own.index_select(0, which)
        norms = raw.gather(1, chosen.index_select(0, which).unsqueeze(1)) - own.unsqueeze(1)
        top = raw.topk(max(counts), dim=-1)
        others, values = top.indices, top.values
        if any(asked):
            others = _with_asked(others, asked)
            values = raw.gather(1, others)
        arrived = bring([own, others, values - norms])

        def read_logprobs() -> dict[int, TokenLogprobs]:
            chosen_logprobs, ids, values = (column.tolist() for column in arrived())
            return dict(zip(reporting, _report(chosen_logprobs, ids, values, counts), strict=True))

        return chosen.int(), read_logprobs

    def _rows(self, sampled: SampledRows, vocab_size: int) -> SamplingRows:
        """What the rows ask for. As long as the same sequences run it stays on the device, where the chosen
        tokens are counted."""
        if self._last is not None and self._last.is_before(sampled):
            there = sampled.device_positions
            if there is None:
                there = send(torch.from_numpy(sampled.positions), sampled.newest.device)
            rows = replace(self._last.rows, positions=there)
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


def _with_asked(likeliest: Tensor, asked: Sequence[Sequence[int]]) -> Tensor:
    """Put the token ids ``asked[row]``, where there are any, in the place of a row's likeliest ones, int64
    [n, k]."""
    columns = torch.full(likeliest.shape, -1, dtype=torch.int64)
    for row, ids in enumerate(asked):
        columns[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    there = send(columns, likeliest.device)
    return torch.where(there < 0, likeliest, there)


def _report(
    own: list[float], ids: list[list[int]], values: list[list[float]], counts: list[int]
) -> list[TokenLogprobs]:
    return [TokenLogprobs(own[i], tuple(ids[i][:n]), tuple(values[i][:n])) for i, n in enumerate(counts)]


def sampling_rows(sampled: SampledRows, eos_token_ids: tuple[int, ...], vocab_size: int) -> SamplingRows:
    """What these sequences ask for, on the device of their newest tokens. Token counts are made for those
    that have penalties."""
    params = [state.params for state in sampled.states]
    greedy = [state.is_greedy(vocab_size) for state in sampled.states]
    penalized = [row for row, p in enumerate(params) if p.has_penalties]
    slots = {row: slot for slot, row in enumerate(penalized)}
    edits = [
        _edits(state, int(at), eos_token_ids)
        for state, at in zip(sampled.states, sampled.positions, strict=True)
    ]
    flat = [(token, *edit) for row in edits for token, edit in row.items()]

    floats, ints, wide = torch.float32, torch.int32, torch.int64
    columns: dict[str, tuple[Sequence[Any], torch.dtype]] = {
        "hashed_seeds": ([hashed_seed(p.seed) for p in params], wide),
        "temperatures": ([p.temperature * (not g) for p, g in zip(params, greedy, strict=True)], floats),
        "top_k": ([p.top_k for p in params], ints),
        "top_p": ([p.top_p for p in params], floats),
        "min_p": ([p.min_p for p in params], floats),
        "repetition": ([p.repetition_penalty for p in params], floats),
        "presence": ([p.presence_penalty for p in params], floats),
        "frequency": ([p.frequency_penalty for p in params], floats),
        "count_slots": ([slots.get(row, -1) for row in range(len(params))], ints),
        "edit_start": (np.cumsum([0, *(len(row) for row in edits)]).tolist(), ints),
        "edit_tokens": ([edit[0] for edit in flat], ints),
        "edit_banned_until": ([edit[1] for edit in flat], ints),
        "edit_bias": ([edit[2] for edit in flat], floats),
        "reporting": ([row for row, p in enumerate(params) if p.logprobs is not None], wide),
    }
    host = {name: torch.tensor(values, dtype=dtype) for name, (values, dtype) in columns.items()}
    host |= _counted(sampled, penalized, vocab_size)
    if sampled.device_positions is None:
        host["positions"] = torch.from_numpy(sampled.positions)
    sent = send_all(host, sampled.newest.device)
    return SamplingRows(
        positions=sent["positions"] if sampled.device_positions is None else sampled.device_positions,
        token_counts=_token_counts(sent, sampled.newest, max(1, len(penalized)), vocab_size),
        edited=bool(penalized or flat),
        filtered=any(
            not g and (p.min_p > 0 or p.top_p < 1 or p.top_k > 0) for p, g in zip(params, greedy, strict=True)
        ),
        **{name: sent[name] for name in columns},
    )


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


def _counted(sampled: SampledRows, penalized: Sequence[int], vocab_size: int) -> dict[str, Tensor]:
    """What ``_token_counts`` adds up, of the rows ``penalized``: indices into the flat counts int64 of prompt
    tokens and of generated ones, with how often int32; and the rows whose newest token the host may not know
    yet, with where their counts begin."""
    prompts, generated, times, rows, starts = [], [], [], [], []
    for slot, row in enumerate(penalized):
        state, start = sampled.states[row], slot * vocab_size
        count = state.num_outputs_before(int(sampled.positions[row]))
        prompts.append(start + distinct_words(state.prompt_token_ids))
        outputs = np.array(state.output_token_ids[: max(0, count - 1)], np.int64)
        ids, often = np.unique(outputs, return_counts=True)
        generated.append(start + ids)
        times.append(often)
        if count:
            rows.append(row)
            starts.append(start)
    return {
        "in_prompts": _joined(prompts),
        "generated": _joined(generated),
        "times": _joined(times).int(),
        "rows_begun": torch.tensor(rows, dtype=torch.int64),
        "starts_begun": torch.tensor(starts, dtype=torch.int64),
    }


def _joined(parts: Sequence[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]))


def _token_counts(sent: dict[str, Tensor], newest: Tensor, num_slots: int, vocab_size: int) -> Tensor:
    """int32 [num_slots, vocab_size], as ``SamplingRows`` has it. The newest tokens are added on the
    device."""
    counts = torch.zeros(num_slots * vocab_size, dtype=torch.int32, device=newest.device)
    counts.index_fill_(0, sent["in_prompts"], IN_PROMPT)
    counts.index_add_(0, sent["generated"], sent["times"])
    begun = newest.index_select(0, sent["rows_begun"]) + sent["starts_begun"]
    counts.index_add_(0, begun, torch.ones_like(begun, dtype=torch.int32))
    return counts.view(num_slots, vocab_size)
