"""A worker with two played GPUs starts, captures its graphs on each, and gives a CPU's tokens."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.ranks.played_nccl import PlayedNccl
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.gpu_runs import BLOCK_SIZE, NUM_BLOCKS, generate, load, on_played_gpu
from support.models import make_checkpoint

from splitserve.bench.kernels import triton_interpreter
from splitserve.engine import loaded_model
from splitserve.engine.cache.sharded_blocks import ShardedBlocks
from splitserve.engine.errors import DeviceLostError
from splitserve.engine.ranks import threads
from splitserve.engine.ranks.nccl import Communicators
from splitserve.engine.step import model_runner
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.engine.step.prefill_graphs import PrefillGraphs
from splitserve.kernels.reference import TorchKernels

triton_interpreter.install()
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered")]
SIZE = 2


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> PlayedNccl:
    library = PlayedNccl(SIZE)
    monkeypatch.setattr(threads, "Communicators", lambda size: Communicators(size, library, lambda: 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: SIZE)
    return library


@pytest.mark.parametrize(
    ("family", "whole_experts"), [("qwen3", False), ("mixtral", False), ("mixtral", True)]
)
def test_a_worker_of_two_gpus(
    family: str, whole_experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: PlayedNccl
) -> None:
    make_checkpoint(tmp_path, family, num_hidden_layers=1)
    with monkeypatch.context() as patched:
        patched.setattr(loaded_model, "select_kernels", lambda *_, **__: TorchKernels())
        whole = engine_config(tmp_path, "cpu", "float32", BLOCK_SIZE, NUM_BLOCKS, max_model_len=40)
        alone = ModelRunner(whole)
        expected, followed = generate(alone)
    with on_played_gpu(monkeypatch) as gpu:
        with monkeypatch.context() as patched:
            collective, thresholds = nccl._collective, set[int]()
            patched.setattr(
                nccl,
                "_collective",
                lambda *args: (thresholds.add(gc.get_threshold()[0]), collective(*args))[1],
            )
            model = load(tmp_path, num_gpus=SIZE, expert_parallel=whole_experts)
        assert thresholds == {0}, "no collection while several threads parse"
        assert gc.get_threshold()[0]
        runner = model.runner
        assert isinstance(runner, ModelRunner)
        assert [str(each.device) for each in runner.ranks] == ["cuda:0", "cuda:1"]
        assert all(each.pool.shape[3] == 1 for each in runner.ranks), "of two heads one on each"
        calls = len(nccl.calls)
        found, matcher = generate(runner, gpu)
        assert isinstance(model.pool, ShardedBlocks)
        held = model.pool.pack([9, 3], slice(0, 1)).cpu().view(torch.float32)
    torch.testing.assert_close(held, alone.kv_cache.pool[[9, 3]].flatten(), rtol=1e-3, atol=1e-3)
    assert matcher.seen == followed.seen
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.token_ids.tolist() == other.token_ids.tolist(), step
        assert {row: reported.top_ids for row, reported in one.logprobs.items()} == {
            row: reported.top_ids for row, reported in other.logprobs.items()
        }
    assert {"sum", "gather", "broadcast"} == set(nccl.calls[calls:])


def test_a_gpu_that_fails_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: PlayedNccl
) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    with on_played_gpu(monkeypatch) as gpu:
        runner = load(tmp_path, num_gpus=SIZE).runner
        assert isinstance(runner, ModelRunner)

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(runner.ranks[1].decoder, "logits", fail)
        monkeypatch.setattr(runner.ranks[1].decoder, "forward", fail)
        with pytest.raises(DeviceLostError, match="out of memory"):
            generate(runner, gpu)


def test_a_step_that_fails_alike_on_all_gpus_is_no_more_than_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: PlayedNccl
) -> None:
    """So does one whose tokens cannot be drawn."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a request that cannot be served")

    with on_played_gpu(monkeypatch) as gpu:
        runner = load(tmp_path, num_gpus=SIZE).runner
        assert isinstance(runner, ModelRunner)
        expected = [output.token_ids.tolist() for output in generate(runner, gpu)[0]]
        with monkeypatch.context() as patched:
            patched.setattr(runner, "_draw", fail)
            with pytest.raises(ValueError, match="cannot be served"):
                generate(runner, gpu)
        gpu.launching = False
        assert [output.token_ids.tolist() for output in generate(runner, gpu)[0]] == expected


def test_exact_bits_are_those_of_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: PlayedNccl
) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    held = []
    for num_gpus in (1, SIZE):
        with monkeypatch.context() as patched, on_played_gpu(patched, exact=True) as gpu:
            model = load(tmp_path, exact=True, num_gpus=num_gpus)
            assert isinstance(model.runner, ModelRunner)
            tokens = [output.token_ids.tolist() for output in generate(model.runner, gpu)[0]]
            assert not isinstance(model.pool, np.ndarray)
            held.append((tokens, model.pool.checksums([9, 3, 1]), model.identity))
    assert held[0] == held[1]
    assert "gather" in nccl.calls


def test_one_gpu_without_memory_for_prefill_graphs_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: PlayedNccl
) -> None:
    """The others would wait for its part of the next graph."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    record = PrefillGraphs._record

    def fail_on_the_second(graphs: PrefillGraphs, *args: Any) -> Any:
        if graphs._model.rank.number == 1:
            raise RuntimeError("CUDA out of memory")
        return record(graphs, *args)

    with on_played_gpu(monkeypatch):
        monkeypatch.setattr(PrefillGraphs, "_record", fail_on_the_second)
        with pytest.raises(DeviceLostError, match="out of memory"):
            load(tmp_path, num_gpus=SIZE)


def test_a_step_is_over_when_all_gpus_have_written_their_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: PlayedNccl
) -> None:
    """Without a token or a layer that is waited for, too."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    with on_played_gpu(monkeypatch) as gpu:
        runner = load(tmp_path, num_gpus=SIZE).runner
        assert isinstance(runner, ModelRunner)
        batch = make_batch([(HandSequence(list(range(12)), [2, 5]), 3)], BLOCK_SIZE)
        before = len(nccl.calls)
        with gpu.launch():
            output = runner.launch(batch)
        assert nccl.calls[before:][-SIZE:] == ["sum"] * SIZE
        assert output().token_ids.tolist() == [-1]


def test_a_lost_gpu_ends_the_step_that_the_others_have_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: PlayedNccl
) -> None:
    """Sums that were broken off give no tokens."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    begun, ended = threading.Event(), threading.Event()

    class Lost:
        def synchronize(self) -> None:
            begun.wait()
            raise RuntimeError("CUDA error: unspecified launch failure")

    def arrived() -> None:
        begun.set()
        assert ended.wait(20), "a sum waits for a lost GPU for ever"

    with on_played_gpu(monkeypatch) as gpu:
        runner = load(tmp_path, num_gpus=SIZE).runner
        assert isinstance(runner, ModelRunner)
        monkeypatch.setattr(threads, "mark_stream", lambda blocking: Lost())
        monkeypatch.setattr(model_runner, "passed", lambda _: arrived)
        monkeypatch.setattr(nccl, "ncclCommAbort", lambda handle: ended.set())
        with gpu.launch():
            output = runner.launch(make_batch([(HandSequence(list(range(12)), [2, 5]), 3)], BLOCK_SIZE))
        with pytest.raises(DeviceLostError, match="a GPU of this worker failed"):
            output()


@pytest.mark.parametrize("graphs", ["_graphs", "_prefill_graphs"])
def test_a_graph_that_one_gpu_does_not_replay_ends_the_worker(
    graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: PlayedNccl
) -> None:
    """The others would wait in theirs, or meet the next step's."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)

    def fail(*_: object, **__: object) -> None:
        raise ValueError("no copy")

    with on_played_gpu(monkeypatch) as gpu:
        runner = load(tmp_path, num_gpus=SIZE).runner
        assert isinstance(runner, ModelRunner)
        nccl.alone = True
        monkeypatch.setattr(getattr(runner, graphs), "logits", fail)
        with pytest.raises(DeviceLostError, match="no copy"):
            generate(runner, gpu)
