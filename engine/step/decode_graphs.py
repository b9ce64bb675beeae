"""Decode steps as CUDA graphs: one for each batch bucket, captured at start, so that a step costs one launch
instead of hundreds.

A graph reads its inputs from buffers that never move (``StepBuffers``); a step copies its own into their
first rows. Rows up to the bucket's size are padding: length 0 and slot -1, for which the kernels read no
cache, write none and give zeros. Context lengths live in the buffers only, so a graph serves all of them. All
write their logits to one place. The largest bucket is captured first: the others fit into its memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..errors import OutOfMemoryError, is_out_of_memory
from ..model.decoder import AttentionMetadata
from .batch import Batch

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
PADDING_SLOT = -1
_log = logging.getLogger(__name__)

Replay = Callable[[], Tensor]
Compute = Callable[[Tensor, AttentionMetadata, Tensor], None]
"""(token_ids, metadata, logits float32 [num_rows, vocab_size]): writes the logits."""


class Recorder(Protocol):
    """Turns a computation on memory that stays where it is into one that can be run again. The result's
    memory stays, too."""

    def __call__(self, compute: Callable[[], Tensor]) -> Replay: ...


class CudaRecorder:
    """Records CUDA graphs that share one memory pool: only one of them may run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(
            side
        ):  # what a first call compiles, tunes and allocates is no part of the graph
            compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class StepBuffers:
    """The inputs of a decode step of up to ``num_rows`` sequences, in fixed memory on the device and, pinned,
    on the host."""

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device) -> None:
        columns = dict.fromkeys(("token_ids", "positions", "seq_lens", "fed_from"), torch.int32)
        columns["slot_mapping"] = torch.int64
        pinned = device.type == "cuda"
        shapes = {
            **{name: ((num_rows,), dtype) for name, dtype in columns.items()},
            "block_tables": ((num_rows, max_blocks), torch.int32),
        }
        self._hosts = [  # two by turns: one may still be copied from when the next step's is filled
            {
                name: torch.zeros(shape, dtype=dtype, pin_memory=pinned)
                for name, (shape, dtype) in shapes.items()
            }
            for _ in range(2)
        ]
        self._device = {
            name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()
        }
        self._query_start_loc = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self.fill(None, num_rows)

    def fill(self, batch: Batch | None, num_rows: int, sampled_last: Tensor | None = None) -> None:
        """The batch's rows, then padding up to ``num_rows``. Block numbers beyond a sequence's last block are
        never read. ``sampled_last``: the tokens of the step before, of which the batch may want some
        (``Batch.fed_from``)."""
        self._hosts.reverse()
        n, host = (
            0 if batch is None else batch.num_seqs,
            {name: tensor.numpy() for name, tensor in self._hosts[0].items()},
        )
        if batch is not None:
            for name in ("token_ids", "positions", "seq_lens", "slot_mapping"):
                host[name][:n] = getattr(batch, name)
            host["fed_from"][:n] = -1 if batch.fed_from is None else batch.fed_from
            host["block_tables"][:n, : batch.block_tables.shape[1]] = batch.block_tables
        for name, value in (
            ("token_ids", 0),
            ("positions", 0),
            ("seq_lens", 0),
            ("slot_mapping", PADDING_SLOT),
            ("fed_from", -1),
        ):
            host[name][n:num_rows] = value
        for name, tensor in self._hosts[0].items():
            self._device[name][:num_rows].copy_(tensor[:num_rows], non_blocking=True)
        if batch is not None and batch.fed_from is not None and sampled_last is not None:
            token_ids = self._device["token_ids"][:n]
            token_ids.copy_(feed(token_ids, self._device["fed_from"][:n], sampled_last))

    def inputs(self, num_rows: int) -> tuple[Tensor, AttentionMetadata]:
        """Token ids and metadata of the first ``num_rows`` rows: views of the fixed memory."""
        first = {name: tensor[:num_rows] for name, tensor in self._device.items() if name != "fed_from"}
        token_ids = first.pop("token_ids")
        starts = self._query_start_loc[: num_rows + 1]
        return token_ids, AttentionMetadata(query_start_loc=starts, max_query_len=None, **first)


class DecodeGraphs:
    """``compute`` recorded for each bucket up to ``max_num_seqs``."""

    def __init__(
        self,
        compute: Compute,
        vocab_size: int,
        max_num_seqs: int,
        max_blocks: int,
        device: torch.device,
        record: Recorder,
    ) -> None:
        self._buckets = buckets_up_to(max_num_seqs)
        self._buffers = StepBuffers(self._buckets[-1], max_blocks, device)
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
                "lower --decode-max-num-seqs or --kv-cache-gib"
            ) from error

    def serves(self, batch: Batch) -> bool:
        """It only decodes, and no more sequences than there is a graph for."""
        return batch.num_seqs <= self._buckets[-1] and batch.only_decodes

    def logits(self, batch: Batch, sampled_last: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """float32 [num_seqs, vocab_size], which the caller may write to, and the input tokens int32
        [num_seqs]. Both are valid until the next call. ``sampled_last``: see ``StepBuffers.fill``."""
        n = batch.num_seqs
        size = next(size for size in self._buckets if size >= n)
        self._buffers.fill(batch, size, sampled_last)
        return self._replays[size]()[:n], self._buffers.inputs(n)[0]

    def _record(self, compute: Compute, size: int, record: Recorder) -> Replay:
        (token_ids, metadata), logits = self._buffers.inputs(size), self._logits[:size]

        def run() -> Tensor:
            compute(token_ids, metadata, logits)
            return logits

        return record(run)


def feed(token_ids: Tensor, fed_from: Tensor, sampled_last: Tensor) -> Tensor:
    """``token_ids`` int32 [n], but ``sampled_last`` [fed_from] where ``fed_from`` int32 [n] is not
    negative."""
    if len(sampled_last) == 0:
        return token_ids
    return torch.where(fed_from >= 0, sampled_last[fed_from.clamp(min=0)], token_ids)


def buckets_up_to(max_num_seqs: int) -> Sequence[int]:
    """Those below ``max_num_seqs``, and the least that holds it (or the largest there is)."""
    return [size for i, size in enumerate(BUCKETS) if i == 0 or BUCKETS[i - 1] < max_num_seqs]
