"""Decode steps of a model with states, replayed on fixed memory: the states are those of plain steps, and
padding touches none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.families import VOCAB_SIZE
from support.models import make_checkpoint
from torch import Tensor

from splitserve.bench.kernels import triton_interpreter
from splitserve.engine import loaded_model
from splitserve.engine.step.batch import Batch, BatchStates
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu.attention_tiles import TileShape
from splitserve.kernels.state_shape import NO_STATE
from splitserve.transport.messages.messages import SamplingParams

triton_interpreter.install()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a poisoned slot beside the ones in use
BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS = 16, 64, 3
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
LENGTHS = (5, 2, 7)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    kinds = ["linear_attention", "full_attention"]
    make_checkpoint(tmp_path, "qwen3_5", num_hidden_layers=2, layer_types=kinds)
    kernels = CudaKernels(num_sms=1, prefill_shape=TileShape(16, 32, 4, 3))
    monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: kernels)
    sizes = {"max_model_len": 80, "max_decode_seqs": MAX_SEQS, "max_prefill_tokens": 64}
    return ModelRunner(engine_config(tmp_path, "cpu", "float32", BLOCK_SIZE, NUM_BLOCKS, **sizes))


class Rows:
    """Sequences, and their states as a decode worker keeps them: that of p tokens is copy p % 2."""

    def __init__(self, runner: ModelRunner) -> None:
        random, self._runner = np.random.default_rng(4), runner
        self._count = runner.kv_cache.layout.state_blocks
        blocks = random.permutation(NUM_BLOCKS).tolist()
        self.sequences = [
            HandSequence(random.integers(0, VOCAB_SIZE, n).tolist(), [blocks.pop() for _ in range(2)], GREEDY)
            for n in LENGTHS
        ]
        self.copies = np.array([[blocks.pop() for _ in range(2 * self._count)] for _ in LENGTHS], np.int32)

    def batch(self, rows: list[int], counts: list[int]) -> Batch:
        picked = [(self.sequences[i], count) for i, count in zip(rows, counts, strict=True)]
        tables, source = [], []
        for i, (sequence, count) in zip(rows, picked, strict=True):
            copies = self.copies[i].reshape(2, -1)
            begins = sequence.num_computed == 0
            tables.append(np.concatenate([copies[:: -1 if begins and count % 2 else 1], copies[:1]]))
            source.append(NO_STATE if begins else sequence.num_computed % 2)
        states = BatchStates(np.stack(tables), np.array(source, np.int32), np.zeros(len(rows), np.int32))
        return replace(make_batch(picked, BLOCK_SIZE), states=states)

    def step(self, rows: list[int], counts: list[int]) -> list[int]:
        tokens: list[int] = self._runner.execute(self.batch(rows, counts)).token_ids.tolist()
        for i, count, token in zip(rows, counts, tokens, strict=True):
            self.sequences[i].num_computed += count
            self.sequences[i].output.append(token)
        return tokens


def replayed(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    result = compute()
    return lambda: result.copy_(compute())


def test_replayed_steps_are_the_plain_ones(runner: ModelRunner) -> None:
    def steps() -> list[list[int]]:
        rows = Rows(runner)
        found = [rows.step([0, 1, 2], list(LENGTHS))]
        for going_on in ([0, 1, 2], [0, 1, 2], [0, 2], [2], [2, 1]):  # in buckets of 4, 2 and 1
            found.append(rows.step(going_on, [1] * len(going_on)))
        return found

    runner.kv_cache.pool.fill_(torch.nan)
    plain, written = steps(), runner.kv_cache.pool.isnan()
    runner.kv_cache.pool.fill_(7.0)
    runner.capture(replayed)
    assert (runner.kv_cache.pool == 7.0).all(), "a recording has only padding"
    assert runner._prefill_graphs is None
    runner.kv_cache.pool.fill_(torch.nan)
    assert steps() == plain
    assert torch.equal(runner.kv_cache.pool.isnan(), written)


@pytest.mark.parametrize("chunks", [[1], [5, 1], [15, 1], [4, 1]])
def test_a_prompt_that_ends_with_a_chunk_of_one_token(runner: ModelRunner, chunks: list[int]) -> None:
    """It looks like a decode step, and has its state in the copy that the chunk before it wrote."""

    def answer() -> tuple[int, Tensor]:
        runner.kv_cache.pool.fill_(0.5)  # what others have left
        rows, token = Rows(runner), -1
        sequence = rows.sequences[0]
        sequence.prompt = [7] * sum(chunks)
        copies, snapshot = rows.copies[0].reshape(2, -1), rows.copies[1][: len(rows.copies[0]) // 2]
        for number, count in enumerate(chunks):
            tables = np.stack([copies[(number - 1) % 2], copies[number % 2], snapshot])
            source = [0 if number else NO_STATE]
            if not number:
                tables[0] = tables[1]
            marks = [count if (sequence.num_computed + count) % BLOCK_SIZE == 0 else 0]
            states = BatchStates(tables[None], np.array(source, np.int32), np.array(marks, np.int32))
            batch = replace(make_batch([(sequence, count)], BLOCK_SIZE), states=states)
            (token,) = runner.execute(batch).token_ids.tolist()
            sequence.num_computed += count
        return token, runner.kv_cache.pool.clone()

    plain = answer()
    runner.capture(replayed)
    token, pool = answer()
    assert token == plain[0]
    assert torch.equal(pool, plain[1])
