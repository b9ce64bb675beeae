"""Steps with prompts as CUDA graphs, one set for each bucket of tokens: a small model computes such a step in
less time than Python needs to launch its kernels.

A graph has room for a bucket's tokens in up to ``num_seqs`` sequences: chunks of prompts, and decode rows
before them. The tokens up to the bucket's size are one more sequence, of length 0 and slot -1: it reads no
cache and writes none. A step replays some parts, a share of the layers each, so that keys and values can
leave meanwhile, and one more for the rows that sample, where any do. Which buckets are used is measured at
start: those whose graph is faster than the launches one by one.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..device import passed
from ..errors import is_out_of_memory
from ..model.decoder import DecoderModel
from ..model.step_inputs import AttentionMetadata
from .batch import Batch
from .decode_graphs import PADDING_SLOT, Recorder, Replay
from .metadata import feed
from .sampler import StepLogits
from .step_thread import OnLayer

TOKEN_BUCKETS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
FEW_TOKENS = 512  # in a bucket of up to these a step has two parts, in a larger one four
MAX_SEQS = 64  # of one graph, padding included
CAPTURE_S = 20.0  # no further bucket is captured after that
FASTER = 0.9  # a graph's time beside the launches', at most
LAUNCH_BOUND = 2.0  # times the quickest step: what takes longer is bound by the device
_log = logging.getLogger(__name__)


class PrefillInputs:
    """The inputs of a step in fixed memory: one run of bytes on the device, and two by turns on the host."""

    def __init__(
        self, num_tokens: int, num_seqs: int, max_blocks: int, device: torch.device, adapted: bool = False
    ) -> None:
        """``adapted``: rows may have adapters."""
        self._adapted = adapted
        wide, narrow = torch.int64, torch.int32
        self._columns = {  # the widest first; the tables last, of which a step sends its own rows only
            "slot_mapping": ((num_tokens,), wide),
            "rows": ((num_seqs,), wide),
            "sampled": ((num_seqs,), wide),
            "token_ids": ((num_tokens,), narrow),
            "positions": ((num_tokens,), narrow),
            "fed_from": ((num_tokens,), narrow),
            "adapters": ((num_tokens,), narrow),
            "seq_lens": ((num_seqs,), narrow),
            "query_start_loc": ((num_seqs + 4,), narrow),  # tables begin at 16 bytes, as kernels expect
            "block_tables": ((num_seqs, max_blocks), narrow),
        }
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in self._columns.values()]
        self._starts = dict(zip(self._columns, np.cumsum([0, *sizes]).tolist(), strict=False))
        hosts = [torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in "ab"]
        self._hosts = [(host, self._views(host)) for host in hosts]
        self._bytes = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self._device = self._views(self._bytes)

    def fill(
        self,
        batch: Batch | None,
        sampled: Sequence[int],
        num_tokens: int,
        num_seqs: int,
        slots: NDArray[np.int32] | None = None,
    ) -> None:
        """The batch and the sequences that sample, padded to a graph's ``num_tokens`` and ``num_seqs``. Two
        steps may be under way: the copy of the one before may still read the other memory on the host."""
        self._hosts.reverse()
        (source, columns), n, s = self._hosts[0], 0, 0
        host = {name: column.numpy() for name, column in columns.items()}
        if batch is not None:
            n, s, width = batch.num_tokens, batch.num_seqs, batch.block_tables.shape[1]
            for name in ("token_ids", "positions", "slot_mapping"):
                host[name][:n] = getattr(batch, name)
            host["fed_from"][:n] = -1 if batch.fed_from is None else batch.fed_from
            host["adapters"][:n] = -1 if slots is None else slots
            host["seq_lens"][:s] = batch.seq_lens
            host["query_start_loc"][:s] = batch.query_start_loc[:-1]
            host["block_tables"][:s, :width] = batch.block_tables
        padding = {"token_ids": 0, "positions": 0, "slot_mapping": PADDING_SLOT, "fed_from": -1}
        padding["adapters"] = -1
        for name, value in padding.items():
            host[name][n:num_tokens] = value
        host["seq_lens"][s:num_seqs] = 0
        host["query_start_loc"][s:num_seqs] = n
        host["query_start_loc"][num_seqs] = num_tokens
        host["sampled"][: len(sampled)] = sampled
        host["rows"][: len(sampled)] = host["query_start_loc"][1:][list(sampled)] - 1
        host["rows"][len(sampled) : num_seqs] = -1
        end = self._starts["block_tables"] + host["block_tables"][:s].nbytes
        self._bytes[:end].copy_(source[:end], non_blocking=True)

    def views(self, num_tokens: int, num_seqs: int) -> tuple[Tensor, AttentionMetadata, Tensor]:
        """Token ids, metadata and sampling rows of a graph."""
        of = self._device
        metadata = AttentionMetadata(
            of["positions"][:num_tokens],
            of["query_start_loc"][: num_seqs + 1],
            of["seq_lens"][:num_seqs],
            of["block_tables"][:num_seqs],
            of["slot_mapping"][:num_tokens],
            adapters=of["adapters"][:num_tokens] if self._adapted else None,
        )
        return of["token_ids"][:num_tokens], metadata, of["rows"][:num_seqs]

    def sampled(self, num_seqs: int, num_sampled: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the last input tokens of the sequences that sample, the lengths of all ``num_seqs``
        sequences of the batch, and which of them sample."""
        of = self._device
        newest = of["token_ids"][of["rows"][:num_sampled]]
        return newest, of["seq_lens"][:num_seqs], of["sampled"][:num_sampled]

    def feed(self, num_tokens: int, sampled_last: Tensor) -> None:
        """Replace the tokens that the step before has sampled (``Batch.fed_from``)."""
        token_ids = self._device["token_ids"][:num_tokens]
        token_ids.copy_(feed(token_ids, self._device["fed_from"][:num_tokens], sampled_last))

    def _views(self, run: Tensor) -> dict[str, Tensor]:
        views = {}
        for name, (shape, dtype) in self._columns.items():
            start, size = self._starts[name], int(np.prod(shape)) * dtype.itemsize
            views[name] = run[start : start + size].view(dtype).view(shape)
        return views


@dataclass(frozen=True, slots=True)
class _Graph:
    num_tokens: int
    num_seqs: int  # padding included
    parts: Sequence[tuple[int, Replay]]  # the number of layers written after each
    sample: Replay  # the logits of the rows that sample
    residual: Tensor  # read and written by all of them: without a reference torch would free it


class PrefillGraphs:
    """The steps of ``model`` recorded for each bucket up to ``max_num_tokens`` where that is faster."""

    def __init__(
        self,
        model: DecoderModel,
        pool: Tensor,
        vocab_size: int,
        max_num_tokens: int,
        max_blocks: int,
        record: Recorder,
        adapted: bool = False,
    ) -> None:
        self._model, self._pool, self._max_blocks = model, pool, max_blocks
        sizes = TOKEN_BUCKETS[: bisect_left(TOKEN_BUCKETS, max_num_tokens) + 1]
        self._inputs = PrefillInputs(sizes[-1], MAX_SEQS, max_blocks, pool.device, adapted)
        self._graphs: list[_Graph] = []
        start, launched, agreed = time.monotonic(), dict[int, float](), model.rank.agreed
        try:
            launched |= self._launched(sizes)
            self._logits = torch.empty((MAX_SEQS, vocab_size), dtype=torch.float32, device=pool.device)
            for size in reversed(launched):  # the largest first: the others fit into its memory
                if self._graphs and agreed(time.monotonic() - start) > CAPTURE_S:
                    _log.info("prefill graphs: none of %d tokens and fewer, for capturing takes long", size)
                    break
                self._graphs.insert(0, self._record(size, record))
        except RuntimeError as error:
            if model.rank.size > 1 or not is_out_of_memory(error):
                raise  # else the other ranks would wait for what this one does not record
            _log.warning("prefill graphs: no memory for more than %d of %d", len(self._graphs), len(sizes))
        self._keep_faster(launched, time.monotonic() - start)

    def logits(
        self,
        batch: Batch,
        sampled: Sequence[int],
        sampled_last: Tensor,
        on_layer: OnLayer | None,
        slots: NDArray[np.int32] | None = None,
    ) -> StepLogits | None:
        """Run the batch, in which the sequences ``sampled`` sample; the result is valid until the next call.
        None: there is no graph for it. ``slots``: see ``StepSlots``."""
        graph = self._graph_for(batch)
        if graph is None:
            return None
        self._inputs.fill(batch, sampled, graph.num_tokens, graph.num_seqs, slots)
        if batch.fed_from is not None:
            self._inputs.feed(batch.num_tokens, sampled_last)
        for num_layers, replay in graph.parts:
            replay()
            if on_layer is not None:
                on_layer(num_layers)
        logits = graph.sample() if sampled else self._logits
        return StepLogits.of(logits[: len(sampled)], *self._inputs.sampled(batch.num_seqs, len(sampled)))

    def _graph_for(self, batch: Batch) -> _Graph | None:
        if batch.block_tables.shape[1] > self._max_blocks:
            return None
        if any(wanted is not None for wanted in (*batch.prompt_logprobs, *batch.embeds)):
            return None  # a graph leaves nothing but logits
        if batch.images or batch.rope is not None:
            return None
        for graph in self._graphs:
            if batch.num_tokens <= graph.num_tokens and batch.num_seqs < graph.num_seqs:
                return graph
        return None

    def _record(self, num_tokens: int, record: Recorder) -> _Graph:
        model, pool, last = self._model, self._pool, self._model.num_layers - 1
        token_ids, metadata, rows = self._padding(num_tokens)
        residual, logits = model.embed(token_ids), self._logits[: len(rows)]

        def part(first: int, end: int, hidden: Tensor | None) -> Tensor:
            if first == 0:
                residual.copy_(model.embed(token_ids))
            inputs = model.inputs(metadata)
            hidden = model.run_layers(first, min(end, last), hidden, residual, inputs, pool)
            if end > last:
                return model.project_last(hidden, residual, inputs, pool)
            assert hidden is not None
            return hidden

        def sample(q: Tensor) -> Tensor:
            inputs = model.inputs(metadata.of_rows(rows))
            return model.logits(model.finish(q[rows], residual[rows], inputs, pool), logits)

        parts: list[tuple[int, Replay]] = []
        hidden, count = None, 2 if num_tokens <= FEW_TOKENS else 4
        for first, end in pairwise(sorted({model.num_layers * i // count for i in range(count + 1)})):
            parts.append((end, record(partial(part, first, end, hidden))))
            hidden = parts[-1][1]()  # where a part leaves it, the next one finds it
        assert hidden is not None
        return _Graph(num_tokens, len(rows), parts, record(partial(sample, hidden)), residual)

    def _launched(self, sizes: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Sizes and the seconds of a launched step, up to the first that is bound by the device."""
        least = float("inf")
        for size in sizes:
            taken = self._model.rank.agreed(seconds(partial(self._launch, size), self._pool.device))
            if taken > LAUNCH_BOUND * (least := min(least, taken)):
                break
            yield size, taken

    def _launch(self, num_tokens: int) -> None:
        token_ids, metadata, rows = self._padding(num_tokens)
        self._model.logits(self._model.forward(token_ids, metadata, self._pool, rows))

    def _keep_faster(self, launched: Mapping[int, float], captured_s: float) -> None:
        """Keep the buckets up to the first whose graph is not faster than the launches."""

        def is_faster(graph: _Graph) -> bool:
            took = self._model.rank.agreed(seconds(partial(self._replay, graph), self._pool.device))
            return took <= FASTER * launched[graph.num_tokens]

        self._graphs = list(takewhile(is_faster, self._graphs))
        buckets = ", ".join(str(graph.num_tokens) for graph in self._graphs) or "no number of"
        _log.info("prefill graphs: %s tokens, captured in %.1f s", buckets, captured_s)

    def _replay(self, graph: _Graph) -> None:
        self._padding(graph.num_tokens)
        for _, part in graph.parts:
            part()
        graph.sample()

    def _padding(self, num_tokens: int) -> tuple[Tensor, AttentionMetadata, Tensor]:
        """Token ids, metadata and sampling rows of a graph, filled with padding alone."""
        num_seqs = min(num_tokens // 2, MAX_SEQS)
        self._inputs.fill(None, (), num_tokens, num_seqs)
        return self._inputs.views(num_tokens, num_seqs)


def seconds(call: Callable[[], None], device: torch.device, times: int = 3) -> float:
    """The least that ``call`` took, its work on the device included."""
    least = float("inf")
    for _ in range(times):
        passed(device)()
        start = time.perf_counter()
        call()
        passed(device)()
        least = min(least, time.perf_counter() - start)
    return least
