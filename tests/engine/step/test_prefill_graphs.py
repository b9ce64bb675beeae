"""Steps of few tokens replayed on fixed memory give what plain ones give: chunks of prompts, decode rows
beside them, whatever is cached; and padding writes nothing.

The kernels are the GPU's, in Triton's interpreter; a graph is played by running the same computation on the
same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from splitserve.engine.model.ranks import ALONE
from splitserve.engine.model.step_inputs import AttentionMetadata
from splitserve.engine.step import prefill_graphs
from splitserve.engine.step.batch import Batch, StepOutput
from splitserve.engine.step.metadata import METADATA
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.engine.step.prefill_graphs import MAX_SEQS, PrefillGraphs, PrefillInputs
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu.attention_tiles import TileShape
from splitserve.transport.messages.messages import SamplingParams

triton_interpreter.install()
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # a poisoned slot beside the ones in use
]
BLOCK_SIZE, NUM_BLOCKS = 8, 32
BUCKETS = (4, 8, 16)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0, logprobs=2)


def keep_all(monkeypatch: pytest.MonkeyPatch, buckets: tuple[int, ...] = BUCKETS) -> None:
    """Whatever a graph's time is, and that of capturing them."""
    monkeypatch.setattr(prefill_graphs, "CAPTURE_S", float("inf"))
    monkeypatch.setattr(prefill_graphs, "TOKEN_BUCKETS", buckets)
    monkeypatch.setattr(prefill_graphs, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(prefill_graphs, "FASTER", 2)


def make_runner(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_layers: int, exact: bool = False
) -> ModelRunner:
    make_checkpoint(folder, "qwen3", num_hidden_layers=num_layers)
    kernels = CudaKernels(num_sms=1, exact=exact, prefill_shape=TileShape(16, 32, 4, 3))
    monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: kernels)
    keep_all(monkeypatch)
    config = engine_config(
        folder, "cpu", "float32", BLOCK_SIZE, NUM_BLOCKS, max_model_len=40, max_prefill_tokens=10
    )
    runner = ModelRunner(config)
    runner.kv_cache.pool.fill_(torch.nan)
    return runner


def replayed(num_replays: list[int]) -> Callable[[Callable[[], Tensor]], Callable[[], Tensor]]:
    """Runs like a graph: the result is always in the same memory. Counts the replays of each recording."""

    def record(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        result, at = compute(), len(num_replays)
        num_replays.append(0)

        def replay() -> Tensor:
            num_replays[at] += 1
            result.copy_(compute())
            return result

        return replay

    return record


def sequences() -> list[HandSequence]:
    random = np.random.default_rng(4)
    rows = random.permutation(NUM_BLOCKS).reshape(-1, 4).tolist()
    return [
        HandSequence(random.integers(0, VOCAB_SIZE, n).tolist(), row, GREEDY)
        for n, row in zip((12, 3, 5, 2), rows, strict=False)
    ]


STEPS: list[list[tuple[int, int]]] = [  # (sequence, tokens)
    [(0, 4)],  # a whole bucket, and no token to sample
    [(1, 3)],  # a prompt, and one token of padding
    [(1, 1), (0, 7)],  # a decode row beside a chunk
    [(0, 1), (1, 1), (2, 5), (3, 1)],  # two of them beside two chunks, of which one samples
]


def run_all(runner: ModelRunner, written: list[int] | None = None, ahead: bool = False) -> list[StepOutput]:
    own, outputs, last = sequences(), [], {}
    for step in STEPS:
        batch = make_batch([(own[i], count) for i, count in step], BLOCK_SIZE)
        outputs.append(runner.execute(fed(batch, step, last) if ahead else batch, (written or []).append))
        last = {i: row for row, (i, _) in enumerate(step) if outputs[-1].token_ids[row] >= 0}
        for (i, count), token in zip(step, outputs[-1].token_ids.tolist(), strict=True):
            own[i].num_computed += count
            own[i].output += [token] if token >= 0 else []
    return outputs


def fed(batch: Batch, step: list[tuple[int, int]], last: dict[int, int]) -> Batch:
    """The same, without knowing the tokens that the step before has sampled."""
    token_ids, fed_from = batch.token_ids.copy(), np.full(batch.num_tokens, -1, np.int32)
    for row, (i, count) in enumerate(step):
        if i in last and count == 1:
            at = batch.query_start_loc[row]
            token_ids[at], fed_from[at] = 0, last[i]
    return replace(batch, token_ids=token_ids, fed_from=fed_from)


def assert_same(found: list[StepOutput], expected: list[StepOutput]) -> None:
    for step, plain in zip(found, expected, strict=True):
        assert step.token_ids.tolist() == plain.token_ids.tolist()
        assert step.logprobs.keys() == plain.logprobs.keys()
        for row, reported in plain.logprobs.items():
            assert step.logprobs[row].top_ids == reported.top_ids
            assert step.logprobs[row].top_logprobs == pytest.approx(reported.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_replayed_steps_are_the_plain_ones(
    num_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(tmp_path, monkeypatch, num_layers)
    plain = run_all(runner)
    written = runner.kv_cache.pool.isnan()
    runner.kv_cache.pool.fill_(torch.nan)
    counts: list[int] = []
    runner.capture(replayed(counts))
    assert runner.kv_cache.pool.isnan().all(), "a recording has only padding"
    assert len(counts) == len(BUCKETS) * (num_layers + 1)
    before, layers = counts.copy(), [0]
    assert_same(run_all(runner, layers, ahead=True), plain)
    assert layers[1:] == [1, 2][:num_layers] * len(STEPS), "half of the layers can leave before the step ends"
    used = [after - was for was, after in zip(before, counts, strict=True)]
    assert used[:: num_layers + 1] == [1, 1, 2], "each step by the least bucket with room; the largest first"
    assert used[num_layers :: num_layers + 1] == [1, 1, 1], "nothing is sampled in the first step"
    assert torch.equal(runner.kv_cache.pool.isnan(), written), "only the sequences' own slots are written"


def test_exact_replays_have_the_bits_of_plain_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(tmp_path, monkeypatch, num_layers=1, exact=True)
    plain, pool = run_all(runner), runner.kv_cache.pool.clone()
    runner.kv_cache.pool.fill_(torch.nan)
    runner.capture(replayed([]))
    found = run_all(runner)
    assert [step.logprobs for step in found] == [step.logprobs for step in plain]
    assert torch.equal(runner.kv_cache.pool.nan_to_num(), pool.nan_to_num())


class Layers:
    """A model that computes nothing."""

    num_layers, rank = 2, ALONE

    def embed(self, token_ids: Tensor) -> Tensor:
        return torch.zeros(len(token_ids), 4)

    def inputs(self, metadata: AttentionMetadata) -> None: ...

    def run_layers(
        self, first: int, last: int, hidden: Tensor | None, residual: Tensor, *_: object
    ) -> Tensor:
        return residual.clone()

    def project_last(self, hidden: Tensor, *_: object) -> Tensor:
        return hidden

    def finish(self, q: Tensor, *_: object) -> Tensor:
        return q

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return hidden if out is None else out


def graphs(record: Callable[[Callable[[], Tensor]], Callable[[], Tensor]], most: int = 10) -> PrefillGraphs:
    model: Any = Layers()
    return PrefillGraphs(model, torch.zeros(1), 4, most, 9, record)


def buckets_of(found: PrefillGraphs, *batches: Batch) -> list[int]:
    """0: it is launched."""
    return [0 if (graph := found._graph_for(batch)) is None else graph.num_tokens for batch in batches]


def test_a_step_runs_in_the_least_bucket_with_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_all(monkeypatch, (8, 16, 32, 64))
    found, own = graphs(replayed([]), most=20), sequences()
    long = HandSequence([1] * 40, [0, 1, 2, 3, 4], GREEDY)
    some = [make_batch([(long, count)], BLOCK_SIZE) for count in (1, 8, 9, 32, 33)]
    assert buckets_of(found, *some) == [8, 8, 16, 32, 0]
    assert buckets_of(found, make_batch([(one, 1) for one in own], BLOCK_SIZE)) == [16], "8: three sequences"
    wide = replace(some[0], block_tables=np.zeros((1, 10), np.int32))
    assert buckets_of(found, wide, make_batch([(own[0], 5)], BLOCK_SIZE, prompt_logprobs=1)) == [0, 0]


def test_buckets_are_used_up_to_the_first_that_is_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 9.0, 9.0, 1.0, 8.5, 1.0])  # launched, then replayed, the smallest bucket first
    monkeypatch.setattr(prefill_graphs, "TOKEN_BUCKETS", BUCKETS)
    monkeypatch.setattr(prefill_graphs, "seconds", lambda *_: next(times))
    found, long = graphs(replayed([])), HandSequence([1] * 40, [0, 1, 2, 3, 4], GREEDY)
    some = [make_batch([(long, count)], BLOCK_SIZE) for count in (4, 5, 16)]
    assert buckets_of(found, *some) == [4, 0, 0]


def test_a_bucket_whose_step_hides_its_launches_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    times, counts = iter([8.0, 9.0, 17.0, 1.0, 1.0]), list[int]()  # three launched, two replayed
    monkeypatch.setattr(prefill_graphs, "TOKEN_BUCKETS", BUCKETS)
    monkeypatch.setattr(prefill_graphs, "seconds", lambda *_: next(times))
    found, long = graphs(replayed(counts)), HandSequence([1] * 40, [0, 1, 2, 3, 4], GREEDY)
    assert buckets_of(found, *[make_batch([(long, n)], BLOCK_SIZE) for n in (4, 8, 9)]) == [4, 8, 0]
    assert len(counts) == 2 * 3


@pytest.mark.parametrize("first", [15.8, 27.0])
def test_a_small_model_has_graphs_of_all_buckets_as_an_h100_timed_them(
    monkeypatch: pytest.MonkeyPatch, first: float
) -> None:
    """Milliseconds of bench/results/gpu.md. The worker beside it may slow the smallest step down."""
    launched = [first, 15.8, 15.8, 15.8, 15.9, 16.0, 17.5, 19.9]
    times = iter([*launched, *[1.43, 1.5, 1.6, 1.8, 2.2, 2.61, 3.34, 4.08]])
    monkeypatch.setattr(prefill_graphs, "seconds", lambda *_: next(times))
    found, batch = graphs(replayed([]), most=2048), make_batch([(sequences()[0], 4)], BLOCK_SIZE)
    assert [graph.num_tokens for graph in found._graphs] == list(prefill_graphs.TOKEN_BUCKETS[:8])
    assert buckets_of(found, batch) == [64]


def test_a_step_of_many_tokens_gives_its_layers_away_in_quarters(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_all(monkeypatch, (8, 16))
    monkeypatch.setattr(prefill_graphs, "FEW_TOKENS", 8)
    monkeypatch.setattr(Layers, "num_layers", 9)
    found, long = graphs(replayed([]), most=16), HandSequence([1] * 40, [0, 1, 2, 3, 4], GREEDY)
    written: list[int] = []
    for num_tokens in (8, 16):
        batch = make_batch([(long, num_tokens)], BLOCK_SIZE)
        assert found.logits(batch, [], torch.empty(0, dtype=torch.int32), written.append) is not None
    assert written == [4, 9, 2, 4, 6, 9]


def test_capturing_ends_in_time_and_where_memory_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep_all(monkeypatch)
    long = make_batch([(HandSequence([1] * 40, [0, 1, 2, 3, 4], GREEDY), 4)], BLOCK_SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(prefill_graphs, "CAPTURE_S", -1)
        assert buckets_of(graphs(replayed([])), long) == [16], "one bucket there is in any case"
    counts: list[int] = []

    def record(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if len(counts) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return replayed(counts)(compute)

    assert buckets_of(graphs(record), long) == [16]
    assert "prefill graphs: no memory for more than 1 of 3" in caplog.text

    def short_of_memory(*_: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(prefill_graphs, "seconds", short_of_memory)
    assert buckets_of(graphs(replayed([])), long) == [0], "a launched step of a whole bucket is too large"
    assert "prefill graphs: no memory for more than 0 of 3" in caplog.text


def test_a_step_that_embeds_runs_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, counts = make_runner(tmp_path, monkeypatch, 2), list[int]()
    batch = replace(make_batch([(sequences()[0], 3)], BLOCK_SIZE), sampling=[None], embeds=[()])
    plain = runner.execute(batch).embeddings[0]
    runner.capture(replayed(counts))
    before = counts.copy()
    assert np.array_equal(runner.execute(batch).embeddings[0], plain)
    assert counts == before


def test_inputs_lie_where_the_kernels_of_launched_steps_can_read_them() -> None:
    token_ids, metadata, rows = PrefillInputs(96, MAX_SEQS, 5, torch.device("cpu")).views(40, 9)
    columns = (token_ids, rows, *(getattr(metadata, name) for name in METADATA))
    assert {(column.data_ptr() - columns[-1].data_ptr()) % 16 for column in columns} == {0}


def test_what_a_call_takes_is_the_least_of_three() -> None:
    calls: list[None] = []
    assert 0 <= prefill_graphs.seconds(lambda: calls.append(None), torch.device("cpu")) < 1
    assert len(calls) == 3
