"""Decode steps as CUDA graphs: one for each batch bucket, captured at start, so that a step costs one launch
instead of hundreds.

A graph reads its inputs from buffers that never move (``StepBuffers``); a step sends one run of words, from
which and from the step before the graph's first kernel derives them. Rows up to the bucket's size are
padding: length 0 and slot -1, for which the kernels read no cache, write none and give zeros. Context lengths
live in the buffers only, so a graph serves all of them. All write their logits to one place. The largest
bucket is captured first: the others fit into its memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.state_shape import PADDING
from ...kernels.states import StateInputs
from ..device import send
from ..errors import OutOfMemoryError, is_out_of_memory
from ..model.step_inputs import AttentionMetadata
from .batch import Batch

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
PADDING_SLOT = -1
HEADER, COLUMNS = 4, 3  # words and columns of a step's run: see kernels/gpu/step_inputs.py
UNKNOWN = -(1 << 31)  # no block has this number
_log = logging.getLogger(__name__)

Replay = Callable[[], Tensor]
Compute = Callable[[Tensor, AttentionMetadata, Tensor], None]
"""(token_ids, metadata, logits float32 [num_rows, vocab_size]): writes the logits."""


class Recorder(Protocol):
    """Turns a computation on memory that stays where it is into one that can be run again. The result's
    memory stays, too."""

    def __call__(self, compute: Callable[[], Tensor]) -> Replay: ...


class CudaRecorder:
    """Records CUDA graphs that share one memory pool: only one of them may run at a time. One stream records
    them all: cuBLAS keeps a workspace of 32 MiB for each stream for good."""

    def __init__(self, alone: bool = True) -> None:
        """``alone``: no other thread of this process uses CUDA meanwhile."""
        self._mode = "global" if alone else "thread_local"
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            compute()  # what a first call compiles, tunes and allocates is no part of the graph
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._side, self._mode):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class Seldom:
    """Rows of int32 ``on_device`` that change seldom: they are sent when they do."""

    def __init__(self, on_device: Tensor) -> None:
        self.on_device = on_device
        self._there: NDArray[np.int32] = on_device.cpu().numpy().copy()

    def send(self, rows: NDArray[np.int32]) -> None:
        there = self._there[: len(rows)]
        if not np.array_equal(there, rows):
            self.on_device[: len(rows)].copy_(send(torch.from_numpy(rows), self.on_device.device))
            there[:] = rows

    def forget(self) -> None:
        """Send all with the next step."""
        self._there.fill(UNKNOWN)


class StepBuffers:
    """The inputs of a decode step of up to ``num_rows`` sequences, in fixed memory on the device.

    A step sends one run of words: how its rows differ from those of the step before, which
    kernels/gpu/step_inputs.py then derives the inputs from (``advance``, the first kernel of each graph)."""

    def __init__(
        self,
        num_rows: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        adapted: bool = False,
        state_blocks: int = 0,
        shifted: bool = False,
    ) -> None:
        """``adapted``: rows may have adapters. ``state_blocks``: of a sequence's state; 0: there is none.
        ``shifted``: rope positions may differ from positions."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_words = HEADER + COLUMNS * num_rows + 2 * num_rows * max_blocks  # where all tables are new
        self._hosts = [  # two by turns: one may still be copied from when the next step's is filled
            torch.zeros(num_words, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)
        ]
        self._packed = zeros(num_words)
        self._block_size = block_size
        self._sampled = zeros(num_rows)
        self._accepted = torch.ones(num_rows, dtype=torch.int32, device=device)
        self._token_ids, self._positions, self._seq_lens = (zeros(num_rows) for _ in range(3))
        self._slots, self._tables = zeros(num_rows, dtype=torch.int64), zeros(num_rows, max_blocks)
        self._query_start_loc = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._tables_there: NDArray[np.int32] = np.zeros((num_rows, max_blocks), np.int32)
        self._states: StateInputs | None = None
        self.state_tables: Seldom | None = None
        self.adapters = Seldom(zeros(num_rows) - 1) if adapted else None
        self.rope_shifts = Seldom(zeros(num_rows)) if shifted else None
        self._rope = zeros(num_rows)
        if state_blocks:
            self.state_tables = Seldom(tables := zeros(num_rows, 3, state_blocks))
            self._states = StateInputs(self._query_start_loc, tables, zeros(num_rows), zeros(num_rows))
        self._last: Tensor | None = None  # the tokens sampled by the step whose lengths are on the device

    def fill(self, batch: Batch | None, num_rows: int, sampled_last: Tensor | None = None) -> None:
        """Send a step's rows; those up to ``num_rows`` are padding. Block numbers beyond a sequence's last
        block are never read. ``sampled_last``: the tokens of the step before, of which the batch may want
        some (``Batch.fed_from``); if that step was not in these buffers, lengths come from the host."""
        self._hosts.reverse()
        host, size = self._hosts[0].numpy(), HEADER + COLUMNS * num_rows
        columns = host[HEADER:size].reshape(COLUMNS, num_rows)
        n = num_changes = 0
        if batch is not None:
            n, width = batch.num_seqs, batch.block_tables.shape[1]
            fed_from = -1 if batch.fed_from is None else batch.fed_from
            for column, values in zip(columns, (batch.token_ids, fed_from, batch.seq_lens), strict=True):
                column[:n] = values
            there = self._tables_there[:n, :width]
            rows, entries = (there != batch.block_tables).nonzero()
            num_changes = len(rows)
            changes = host[size : size + 2 * num_changes].reshape(num_changes, 2)
            changes[:, 0] = rows * self._tables.shape[1] + entries
            changes[:, 1] = there[rows, entries] = batch.block_tables[rows, entries]
            size += 2 * num_changes
        host[:HEADER] = n, num_changes, self._last is not None and self._last is sampled_last, 0
        self._last = None
        self._packed[:size].copy_(self._hosts[0][:size], non_blocking=True)
        if sampled_last is not None and batch is not None and batch.fed_from is not None:
            sampled_last = sampled_last[: len(self._sampled)]
            self._sampled[: len(sampled_last)].copy_(sampled_last)

    def advance(self, num_rows: int) -> None:
        """Derive the inputs of the first ``num_rows`` rows from the words that ``fill`` has sent."""
        from ...kernels.gpu.step_inputs import advance  # which needs Triton

        advance(
            self._packed, self._sampled, self._accepted, self._token_ids, self._positions, self._seq_lens,
            self._slots, self._tables, num_rows, self._block_size,
        )  # fmt: skip
        if self.rope_shifts is not None:
            torch.add(self._positions, self.rope_shifts.on_device, out=self._rope)
            self._rope.clamp_(min=0)  # rows of padding
        if self._states is not None:  # of p tokens it is copy p % 2, see decode/sequences.py
            copies = torch.where(self._seq_lens > 0, self._positions % 2, PADDING)
            self._states.source.copy_(copies)

    def sampled(self, tokens: Tensor) -> None:
        """The step that was filled last has run, and sampled ``tokens``."""
        self._last = tokens

    def forget(self) -> None:
        """Send everything with the next step: this one may have failed halfway."""
        self._tables_there.fill(UNKNOWN)
        for column in (self.adapters, self.rope_shifts, self.state_tables):
            if column is not None:
                column.forget()
        self._last = None

    def inputs(self, num_rows: int) -> tuple[Tensor, AttentionMetadata]:
        """Token ids and metadata of the first ``num_rows`` rows: views of the fixed memory."""
        positions, seq_lens, slots, tables = (
            column[:num_rows] for column in (self._positions, self._seq_lens, self._slots, self._tables)
        )
        starts = self._query_start_loc[: num_rows + 1]
        adapters = None if self.adapters is None else self.adapters.on_device[:num_rows]
        states = self._states
        if states is not None:
            rows = states.tables[:num_rows], states.source[:num_rows], states.marks[:num_rows]
            states = StateInputs(starts, *rows)
        rope = None if self.rope_shifts is None else self._rope[:num_rows]
        return self._token_ids[:num_rows], AttentionMetadata(
            positions, starts, seq_lens, tables, slots, None, adapters, states, rope
        )


class DecodeGraphs:
    """``compute`` recorded for each bucket up to ``max_num_seqs``."""

    def __init__(
        self,
        compute: Compute,
        vocab_size: int,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        record: Recorder,
        adapted: bool = False,
        state_blocks: int = 0,
        shifted: bool = False,
    ) -> None:
        """``adapted``, ``state_blocks``, ``shifted``: see ``StepBuffers``."""
        self._buckets = buckets_up_to(max_num_seqs)
        self._buffers = StepBuffers(
            self._buckets[-1], max_blocks, block_size, device, adapted, state_blocks, shifted
        )
        self._buffers.fill(None, 1)
        self._replays: dict[int, Replay] = {}
        start = time.monotonic()
        try:
            self._logits = torch.empty((self._buckets[-1], vocab_size), dtype=torch.float32, device=device)
            for done, size in enumerate(reversed(self._buckets), start=1):
                self._replays[size] = self._record(compute, size, record)
                _log.info(
                    "decode graph %d of %d: %d sequences, %.1f s",
                    done,
                    len(self._buckets),
                    size,
                    time.monotonic() - start,
                )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(
                f"no memory for the graphs of decode steps of up to {self._buckets[-1]} sequences ({error}); "
                "lower --max-num-seqs (`splitserve up`: --decode-max-num-seqs), --kv-cache-gib or "
                "--gpu-memory-utilization"
            ) from error

    def serves(self, batch: Batch) -> bool:
        """Whether it only decodes, and no more sequences than there is a graph for, now and in the rows of
        the step before that it is fed from. A prompt's last token by itself may have its state elsewhere."""
        most, states = self._buckets[-1], batch.states
        fed = batch.fed_from is None or int(batch.fed_from.max(initial=-1)) < most
        if not (fed and batch.num_seqs <= most and batch.only_decodes) or batch.images:
            return False
        return states is None or not (states.marks.any() or (states.source != batch.positions % 2).any())

    def logits(
        self, batch: Batch, sampled_last: Tensor | None = None, slots: NDArray[np.int32] | None = None
    ) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """float32 [num_seqs, vocab_size], which the caller may write to, the input tokens int32 [num_seqs]
        and the metadata. All are valid until the next call. ``sampled_last``: see ``StepBuffers.fill``; the
        caller passes this step's tokens to ``sampled``. ``slots``: see ``StepSlots``."""
        n = batch.num_seqs
        size = next(size for size in self._buckets if size >= n)
        try:
            self._buffers.fill(batch, size, sampled_last)
            if self._buffers.adapters is not None and slots is not None:
                self._buffers.adapters.send(slots)
            if self._buffers.state_tables is not None and batch.states is not None:
                self._buffers.state_tables.send(batch.states.tables)
            if self._buffers.rope_shifts is not None:
                rope = batch.positions if batch.rope is None else batch.rope
                self._buffers.rope_shifts.send(rope - batch.positions)
            logits = self._replays[size]()[:n]
        except Exception:
            self._buffers.forget()
            raise
        return logits, *self._buffers.inputs(n)

    def sampled(self, tokens: Tensor) -> None:
        """The tokens of the last step's rows: the next one may begin from its lengths."""
        self._buffers.sampled(tokens)

    def _record(self, compute: Compute, size: int, record: Recorder) -> Replay:
        (token_ids, metadata), logits = self._buffers.inputs(size), self._logits[:size]

        def run() -> Tensor:
            self._buffers.advance(size)
            compute(token_ids, metadata, logits)
            return logits

        return record(run)


def buckets_up_to(max_num_seqs: int) -> Sequence[int]:
    """Those below ``max_num_seqs``, and the least that holds it (or the largest there is)."""
    return [size for i, size in enumerate(BUCKETS) if i == 0 or BUCKETS[i - 1] < max_num_seqs]
