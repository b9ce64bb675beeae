"""Decode steps replayed on fixed memory give what plain ones give, for any batch size and context, and
padding touches nothing.

The kernels are the GPU's, in Triton's interpreter; what a CUDA graph does is played by running the same
computation on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from splitserve.engine.errors import OutOfMemoryError
from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.engine.step.decode_graphs import BUCKETS, CudaRecorder, StepBuffers, buckets_up_to
from splitserve.engine.step.device_sampler import DeviceSampler
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu.attention_tiles import TileShape
from splitserve.transport.messages.messages import SamplingParams

triton_interpreter.install()
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # a poisoned slot beside the ones in use
]
BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS = 8, 64, 3
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, logprobs=2)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    return make_runner(tmp_path, monkeypatch, "llama3")


def make_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> ModelRunner:
    make_checkpoint(tmp_path, family, num_hidden_layers=1)
    monkeypatch.setattr(
        loaded_model,
        "select_kernels",
        lambda *_, **__: CudaKernels(num_sms=1, prefill_shape=TileShape(16, 32, 4, 3)),
    )
    config = engine_config(
        tmp_path, "cpu", "float32", BLOCK_SIZE, NUM_BLOCKS, max_model_len=80, max_decode_seqs=MAX_SEQS
    )
    runner = ModelRunner(config)
    runner.kv_cache.pool.fill_(torch.nan)
    return runner


def replayed(recorded: list[tuple[int, int]]) -> Callable[[Callable[[], Tensor]], Callable[[], Tensor]]:
    """Runs like a graph: the result is always in the same memory. Notes the results' addresses and rows."""

    def record(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        result = compute()
        recorded.append((result.data_ptr(), len(result)))

        def replay() -> Tensor:
            result.copy_(compute())
            return result

        return replay

    return record


def prompts(*lengths: int) -> list[HandSequence]:
    random = np.random.default_rng(4)
    rows = random.permutation(NUM_BLOCKS).reshape(-1, 8).tolist()
    return [
        HandSequence(random.integers(0, VOCAB_SIZE, n).tolist(), row, GREEDY)
        for n, row in zip(lengths, rows, strict=False)
    ]


def run(runner: ModelRunner, sequences: list[HandSequence], counts: list[int]) -> StepOutput:
    output = runner.execute(make_batch(list(zip(sequences, counts, strict=True)), BLOCK_SIZE))
    for sequence, count, token in zip(sequences, counts, output.token_ids.tolist(), strict=True):
        sequence.num_computed += count
        sequence.output.append(token)
    return output


def test_replayed_steps_are_the_plain_ones(runner: ModelRunner) -> None:
    def steps() -> list[StepOutput]:
        sequences = prompts(9, 3, 18)
        reported = [run(runner, sequences, [9, 3, 18])]
        for going_on in (
            sequences,
            sequences[:2],
            sequences[2:],
        ):  # buckets of 4, 2, 1; contexts of any length
            reported.append(run(runner, going_on, [1] * len(going_on)))
        return reported

    plain = steps()
    pool = runner.kv_cache.pool.clone()
    recorded: list[tuple[int, int]] = []
    runner.kv_cache.pool.fill_(torch.nan)
    runner.capture(replayed(recorded))
    assert [rows for _, rows in recorded] == [4, 2, 1]  # largest first
    assert len({address for address, _ in recorded}) == 1, "all graphs give their logits in one place"
    assert runner.kv_cache.pool.isnan().all()  # a recording has only padding
    for step, expected in zip(steps(), plain, strict=True):
        assert step.token_ids.tolist() == expected.token_ids.tolist()
        for row, reported in expected.logprobs.items():
            assert step.logprobs[row].top_ids == reported.top_ids
            assert step.logprobs[row].top_logprobs == pytest.approx(reported.top_logprobs, abs=1e-4)
    assert torch.equal(
        runner.kv_cache.pool.isnan(), pool.isnan()
    )  # nothing but the sequences' own slots was written


def test_rope_positions_behind_images_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(tmp_path, monkeypatch, "qwen3_vl")
    monkeypatch.setattr(runner.loaded, "vision", object())

    def tokens() -> list[list[int]]:
        sequences = prompts(9, 12, 18)
        for sequence, shift in zip(sequences, (0, -4, -9), strict=True):
            sequence.rope_shift = shift
        run(runner, sequences, [9, 12, 18])
        for rows in ((0, 1, 2), (2, 1), (0, 1), (2,)):
            run(runner, [sequences[row] for row in rows], [1] * len(rows))
        return [sequence.output for sequence in sequences]

    plain = tokens()
    runner.capture(replayed([]))
    assert tokens() == plain


@pytest.mark.parametrize("launched", [False, True])
def test_a_replayed_step_takes_its_tokens_from_the_one_before(runner: ModelRunner, launched: bool) -> None:
    runner.capture(replayed([]))
    runner._sampler = DeviceSampler((2,)) if launched else runner._sampler
    execute = (lambda batch: runner.launch(batch)()) if launched else runner.execute
    reported: list[list[int]] = []
    for ahead in (False, True):
        sequences = prompts(9, 3, 18)
        run(runner, sequences, [9, 3, 18])
        for rows in ([2, 0], [0]):
            batch = make_batch([(sequences[i], 1) for i in rows], BLOCK_SIZE)
            if ahead:
                fed_from = np.array([2, 0] if len(rows) == 2 else [1], np.int32)
                batch = replace(batch, token_ids=np.zeros_like(batch.token_ids), fed_from=fed_from)
            output = execute(batch)
            for i, token in zip(rows, output.token_ids.tolist(), strict=True):
                sequences[i].num_computed += 1
                sequences[i].output.append(token)
        reported.append([token for s in sequences for token in s.output])
    assert reported[0] == reported[1]


def test_inputs_follow_from_the_step_before() -> None:
    """Lengths and slots of fed rows are not the host's, entries of tables are sent when they change; after a
    failure all are."""
    buffers = StepBuffers(4, 8, BLOCK_SIZE, torch.device("cpu"))
    sequences, entries = prompts(9, 3, 18), list[int]()
    for s in sequences:
        s.num_computed = len(s.prompt) - 1

    def check(rows: list[int], batch: Batch, fed_from: list[int] | None, sampled: Tensor) -> None:
        expected = make_batch([(sequences[i], 1) for i in rows], BLOCK_SIZE)
        buffers.fill(batch, 4, sampled)
        entries.append(int(buffers._packed[1]))
        buffers.advance(4)
        token_ids, metadata = buffers.inputs(4)
        n, known = len(rows), torch.from_numpy(expected.token_ids)
        assert token_ids[:n].tolist() == (known if fed_from is None else sampled[fed_from]).tolist()
        assert metadata.seq_lens.tolist() == [*expected.seq_lens.tolist(), *[0] * (4 - n)]
        assert metadata.positions[:n].tolist() == expected.positions.tolist()
        assert metadata.slot_mapping.tolist() == [*expected.slot_mapping.tolist(), *[-1] * (4 - n)]
        for row, length in enumerate(expected.seq_lens.tolist()):
            used = -(-length // BLOCK_SIZE)
            assert metadata.block_tables[row, :used].tolist() == expected.block_tables[row, :used].tolist()
        for i in rows:
            sequences[i].num_computed += 1
            sequences[i].output.append(0)

    def fed(rows: list[int], fed_from: list[int]) -> Batch:
        batch = make_batch([(sequences[i], 1) for i in rows], BLOCK_SIZE)
        unknown = {
            name: np.full_like(getattr(batch, name), 77) for name in ("seq_lens", "positions", "slot_mapping")
        }
        return replace(batch, fed_from=np.array(fed_from, np.int32), **unknown)

    sampled = torch.tensor([41, 42, 43, 44], dtype=torch.int32)
    check([0, 1, 2], make_batch([(s, 1) for s in sequences], BLOCK_SIZE), None, sampled)
    for rows, fed_from in (([2, 0, 1], [2, 0, 1]), ([1, 2], [2, 0]), ([2], [1])):
        for step in range(9):  # over the ends of blocks
            sampled, before = sampled + 1, list(range(len(rows))) if step else fed_from
            buffers.sampled(sampled)
            check(rows, fed(rows, before), before, sampled)
    assert entries.count(0) > len(entries) // 2
    buffers.forget()
    check([1, 0], make_batch([(sequences[i], 1) for i in (1, 0)], BLOCK_SIZE), None, sampled)


def test_one_stream_records_all_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    used: list[object] = []

    class Stream:
        def __init__(self) -> None:
            made.append(self)

        def wait_stream(self, other: object) -> None: ...

    @contextmanager
    def graph(_: object, pool: object, stream: object, mode: str) -> Iterator[None]:
        used.append(stream)
        yield

    current = Stream()
    for name, value in {
        "Stream": Stream, "graph": graph, "stream": lambda _: nullcontext(),
        "current_stream": lambda: current, "graph_pool_handle": object, "CUDAGraph": object,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    record = CudaRecorder()
    for _ in range(3):
        record(lambda: torch.zeros(1))
    assert used == [made[1]] * 3
    assert len(made) == 2


def test_what_is_no_decode_step_runs_plainly(runner: ModelRunner) -> None:
    runner.capture(replayed([]))
    graphs = runner._graphs
    assert graphs is not None
    sequences = prompts(9, 5, 4, 3, 2)
    for s in sequences:
        s.num_computed = len(s.prompt) - 1
    assert graphs.serves(make_batch([(s, 1) for s in sequences[:4]], BLOCK_SIZE))
    assert not graphs.serves(
        make_batch([(s, 1) for s in sequences], BLOCK_SIZE)
    )  # more than the largest graph has
    sequences[0].num_computed -= 1
    assert not graphs.serves(make_batch([(sequences[0], 2)], BLOCK_SIZE))
    assert not graphs.serves(
        make_batch([(sequences[0], 1)], BLOCK_SIZE)
    )  # one token, but of a prompt that goes on
    assert not graphs.serves(make_batch([(sequences[1], 1)], BLOCK_SIZE, prompt_logprobs=1))


def test_no_memory_for_a_graph_says_what_to_lower(runner: ModelRunner) -> None:
    def record(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutOfMemoryError, match=r"lower --max-num-seqs .*--kv-cache-gib"):
        runner.capture(record)


def test_buckets() -> None:
    assert buckets_up_to(1) == [1]
    assert buckets_up_to(3) == [1, 2, 4]
    assert buckets_up_to(64)[-2:] == [48, 64]
    assert buckets_up_to(1000) == list(BUCKETS)
