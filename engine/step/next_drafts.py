"""Drafts by the model's own layer (``prediction_layer.py``), behind the sampling of each step.

The layer runs over all tokens of a step, so that its keys and values are there for what comes: of a prompt's
tokens with those that follow them, of a sequence's last one with the token that was sampled. Its attention,
and the head, are computed only for sequences that want drafts, behind their last row that was right: those
before it have sampled its input. That row's further drafts come from the layer again, at the next positions.

The row that was right is found on the device: the host waits for nothing before it asks for the drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..device import bring, passed, send
from ..model.decoder import DecoderModel
from ..model.prediction_layer import PredictionLayer
from ..model.step_inputs import AttentionMetadata, StepInputs
from .batch import Batch
from .step_thread import OnLayer

Drafts = Callable[[], dict[int, list[int]]]
"""Waits for the drafts and for the layer's keys and values: ``StepOutput.drafts``."""
NO_DRAFTS: Drafts = dict
NO_TOKEN = -1


class StepHidden(NamedTuple):
    """What the model has computed of a step, on its device.

    hidden    [num_tokens, hidden_size]  final hidden states
    token_ids int32 [num_tokens]
    """

    hidden: Tensor
    token_ids: Tensor
    metadata: AttentionMetadata


class NextDrafts:
    """Runs the layer of ``model`` that predicts. ``num_layers``: of the KV cache, this one included."""

    def __init__(self, model: DecoderModel, layer: PredictionLayer, pool: Tensor, num_layers: int) -> None:
        self._model, self._layer, self._pool, self._num_layers = model, layer, pool, num_layers
        self._kept: Tensor | None = None

    def keep(self, hidden: Tensor) -> None:
        """In a decode graph: leave the hidden states where ``kept`` finds them. The largest comes first."""
        if self._kept is None:
            self._kept = torch.empty_like(hidden)
        self._kept[: len(hidden)].copy_(hidden)

    def kept(self, num_rows: int) -> Tensor:
        assert self._kept is not None, "a graph was replayed"
        return self._kept[:num_rows]

    def launch(
        self, batch: Batch, step: StepHidden, sampled: Tensor | None, on_layer: OnLayer | None
    ) -> Drafts:
        """Write the layer's keys and values, and begin to draft where the batch asks for it. ``sampled``
        int32 [num_seqs]: the step's tokens; None: no sequence samples."""
        model, metadata = self._model, step.metadata
        if sampled is None:
            sampled = torch.full_like(metadata.seq_lens, NO_TOKEN)
        tokens, inputs = next_tokens(batch, step, sampled), model.inputs(metadata)
        embedded = model.embed(tokens, self._layer.table)
        q, residual = self._layer.project(embedded, step.hidden, inputs, self._pool)
        if on_layer is not None:
            on_layer(self._num_layers)
        chains = draft_chains(batch)
        if chains is None:
            if model.rank.size > 1:  # all are to have written keys and values
                model.rank.sum(torch.zeros(1, device=step.hidden.device))
            return _none_when(passed(step.hidden.device))
        rows = last_right_rows(chains, step, sampled)
        first = StepHidden(step.hidden, tokens, metadata)
        arrived = bring([rows, self._draft(batch, rows, first, inputs, q, residual)])
        counts = batch.num_drafts
        assert counts is not None, "else there are no chains"

        def read() -> dict[int, list[int]]:
            found, drafts = (column.tolist() for column in arrived())
            return {row: of[: counts[row]] for row, of in zip(found, drafts, strict=True) if counts[row] > 0}

        return read

    def _draft(
        self, batch: Batch, rows: Tensor, first: StepHidden, inputs: StepInputs, q: Tensor, residual: Tensor
    ) -> Tensor:
        """Drafts int32 [n, most] of the sequences with numbers ``rows`` int64 [n] in the batch. A sequence
        that wants fewer repeats its last pass, which writes the same again. ``first`` and ``inputs``: those
        of the layer; ``q``, ``residual``: its queries and residual."""
        assert batch.num_drafts is not None
        at, most = _ends(first.metadata)[rows], int(batch.num_drafts.max())
        counts = send(torch.from_numpy(batch.num_drafts), rows.device)[rows]
        metadata = replace(first.metadata.of_rows(at), max_query_len=1)
        tokens, hidden, start = first.token_ids[at], first.hidden[at], metadata.positions
        inputs = self._model.inputs_of_rows(inputs, metadata, at)
        q, residual = q[at], residual[at]
        drafts: list[Tensor] = []
        while True:
            out = self._layer.finish(q, residual, inputs, self._pool)
            drafts.append(self._model.logits(out, head=self._layer.head).argmax(-1).int())
            if (i := len(drafts)) == most:
                return torch.stack(drafts, dim=1)
            goes_on = i < counts
            tokens = torch.where(goes_on, drafts[-1], tokens)
            hidden = torch.where(goes_on[:, None], out, hidden)
            positions = start + counts.sub(1).clamp(0, i)
            inputs = self._model.inputs(moved(metadata, positions, self._pool.shape[4]))
            embedded = self._model.embed(tokens, self._layer.table)
            q, residual = self._layer.project(embedded, hidden, inputs, self._pool)


def next_tokens(batch: Batch, step: StepHidden, sampled: Tensor) -> Tensor:
    """int32 [num_tokens]: the token behind each of the step's. Where none is known, of a sequence that ends
    with this step and samples nothing, it is 0: what goes on from its cached blocks drafts the worse."""
    if batch.next_ids is not None:
        known = send(torch.from_numpy(batch.next_ids), sampled.device)
        sampled = torch.where(known >= 0, known, sampled)
    if batch.num_tokens > batch.num_seqs:
        tokens = step.token_ids.roll(-1)
        tokens[_ends(step.metadata)] = sampled
        sampled = tokens
    return sampled.clamp(min=0)


def draft_chains(batch: Batch) -> NDArray[np.int64] | None:
    """[n, most rows]: for each sequence that wants drafts its rows in the batch, each behind the one whose
    token its input drafts, then -1; None: none wants any."""
    if batch.num_drafts is None or not batch.num_drafts.any():
        return None
    before = [NO_TOKEN] * batch.num_seqs if batch.draft_of is None else batch.draft_of.tolist()
    chains: list[list[int]] = []
    for row, of in enumerate(before):
        chains.append([row] if of < 0 else chains[of])
        if of >= 0:
            chains[of].append(row)
    wanted = [chain for row, chain in enumerate(chains) if before[row] < 0 and batch.num_drafts[chain].any()]
    filled = np.full((len(wanted), max(map(len, wanted))), -1, np.int64)
    for own, chain in zip(filled, wanted, strict=True):
        own[: len(chain)] = chain
    return filled


def last_right_rows(chains: NDArray[np.int64], step: StepHidden, sampled: Tensor) -> Tensor:
    """int64 [n]: of each of the ``draft_chains`` the last row with only right rows before it."""
    rows = send(torch.from_numpy(chains), sampled.device)
    inputs = step.token_ids[_ends(step.metadata)]
    right = (sampled[rows[:, :-1]] == inputs[rows[:, 1:]]) & (rows[:, 1:] >= 0)
    return rows.gather(1, right.long().cumprod(1).sum(1, keepdim=True))[:, 0]


def moved(metadata: AttentionMetadata, positions: Tensor, block_size: int) -> AttentionMetadata:
    """Return the metadata of the same sequences, each with one token, at these positions."""
    block = metadata.block_tables.gather(1, (positions // block_size).long()[:, None])[:, 0]
    slots = block.long() * block_size + positions % block_size
    return replace(metadata, positions=positions, seq_lens=positions + 1, slot_mapping=slots)


def _none_when(written: Callable[[], None]) -> Drafts:
    def read() -> dict[int, list[int]]:
        written()
        return {}

    return read


def _ends(metadata: AttentionMetadata) -> Tensor:
    """int64 [num_seqs]: the last token row of each sequence."""
    return (metadata.query_start_loc[1:] - 1).long()
