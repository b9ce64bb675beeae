"""Exact mode through a whole model with the GPU's kernels: a token's logits are the same bits however it
comes to be computed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ...engine.step.batch import Batch, SamplingState
from ...engine.step.decode_graphs import CudaRecorder
from ...transport.messages.messages import SamplingParams
from .engine_figures import BLOCK_SIZE, QWEN3_600M, TINY, BareEngine, run_again

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens from ``start`` to ``stop`` of a sequence whose keys and values lie in ``blocks``."""

    token_ids: list[int]
    blocks: list[int]
    start: int
    stop: int


def batch_of(spans: list[Span]) -> Batch:
    """One step of these; the last token of each is sampled."""
    tables = np.zeros((len(spans), max(len(span.blocks) for span in spans)), np.int32)
    for row, span in enumerate(spans):
        tables[row, : len(span.blocks)] = span.blocks
    positions = [np.arange(span.start, span.stop, dtype=np.int32) for span in spans]
    slots = [
        tables[row, p // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + p % BLOCK_SIZE
        for row, p in enumerate(positions)
    ]
    return Batch(
        token_ids=np.concatenate(
            [np.array(span.token_ids[span.start : span.stop], np.int32) for span in spans]
        ),
        positions=np.concatenate(positions),
        query_start_loc=np.cumsum([0, *(span.stop - span.start for span in spans)]).astype(np.int32),
        seq_lens=np.array([span.stop for span in spans], np.int32),
        block_tables=tables,
        slot_mapping=np.concatenate(slots),
        sampling=[SamplingState(GREEDY, span.token_ids[: span.stop], []) for span in spans],
    )


def exact_engine(big: bool, device: str) -> float:
    """0 if a prompt's last logits and its cache, and a decoded token's logits, have the same bits: alone and
    in a batch, at once and in chunks, over a cached prefix, decoded (by graphs of two sizes) and
    prefilled."""
    length, batch, record = (700, 64, CudaRecorder()) if big else (70, 3, run_again)
    engine = BareEngine(
        QWEN3_600M if big else TINY, torch.device(device), True, 1024 if big else 256, (batch, record),
        num_tokens=4 * (length + BLOCK_SIZE),
    )  # fmt: skip
    random = np.random.default_rng(3)
    blocks_each = length // BLOCK_SIZE + 1

    def tokens() -> list[int]:
        return [int(token) for token in random.integers(0, engine.config.vocab_size, length + 1)]

    def blocks(place: int) -> list[int]:
        return list(range(place * blocks_each, (place + 1) * blocks_each))

    def run(*spans: Span) -> Tensor:
        return engine.step_logits(batch_of(list(spans)))

    ours, other = tokens(), tokens()
    whole = run(Span(ours, blocks(0), 0, length))[0]
    cuts = [0, 7, length // 2, length]
    for start, stop in pairwise(cuts):
        chunked = run(Span(other, blocks(2), start, stop), Span(ours, blocks(1), start, stop))[1]
    prefix = blocks(0)[: (length - 1) // BLOCK_SIZE]
    cached = run(Span(ours, prefix + blocks(2)[len(prefix) :], len(prefix) * BLOCK_SIZE, length))[0]
    alone = engine.decode_logits(batch_of([Span(ours, blocks(0), length, length + 1)]))[0].clone()
    beside = [Span(other, blocks(2), 5 * i % 60, 5 * i % 60 + 1) for i in range(batch - 1)]
    together = engine.decode_logits(batch_of([*beside, Span(ours, blocks(1), length, length + 1)]))[
        -1
    ].clone()
    prefilled = run(Span(ours, blocks(3), 0, length + 1))[0]
    pairs = ((whole, chunked), (whole, cached), (alone, together), (alone, prefilled))
    same = all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in pairs)
    full = length // BLOCK_SIZE
    return float(not (same and torch.equal(engine.pool[blocks(0)[:full]], engine.pool[blocks(1)[:full]])))
