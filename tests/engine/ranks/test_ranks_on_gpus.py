"""A worker with two played GPUs starts, captures its graphs on each, and gives a CPU's tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.ranks.played_nccl import PlayedNccl
from support.engines import engine_config
from support.gpu_runs import BLOCK_SIZE, NUM_BLOCKS, generate, on_played_gpu
from support.models import make_checkpoint

from splitserve.bench.kernels import triton_interpreter
from splitserve.engine import loaded_model
from splitserve.engine.errors import DeviceLostError
from splitserve.engine.ranks import threads
from splitserve.engine.ranks.host import HostRank
from splitserve.engine.ranks.nccl import Communicators
from splitserve.engine.ranks.threads import OtherRanks
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels.reference import TorchKernels

triton_interpreter.install()
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered")]
SIZE = 2


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> PlayedNccl:
    """One thread at a time computes, for Triton's interpreter is no good for two; while a rank waits for
    others, another has its turn."""
    turn, library = threading.Lock(), PlayedNccl(SIZE)

    def without_turn(call: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*args: Any) -> Any:
            turn.release()
            try:
                return call(*args)
            finally:
                turn.acquire()

        return waits

    begin, finish = OtherRanks.begin, OtherRanks.finish

    def begin_in_turn(ranks: OtherRanks[Any], work: Callable[[Any], object]) -> None:
        def in_turn(runner: Any) -> None:
            with turn:
                work(runner)

        begin(ranks, in_turn)
        turn.acquire()

    def finish_in_turn(ranks: OtherRanks[Any], own: Exception | None = None) -> None:
        turn.release()
        finish(ranks, own)

    monkeypatch.setattr(OtherRanks, "begin", begin_in_turn)
    monkeypatch.setattr(OtherRanks, "finish", finish_in_turn)
    monkeypatch.setattr(library, "_collective", without_turn(library._collective))
    monkeypatch.setattr(library, "ncclCommInitRank", without_turn(library.ncclCommInitRank))
    monkeypatch.setattr(HostRank, "_from", without_turn(HostRank._from))
    monkeypatch.setattr(threads, "Communicators", lambda size: Communicators(size, library, lambda: 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: SIZE)
    return library


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_a_worker_of_two_gpus(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: PlayedNccl
) -> None:
    make_checkpoint(tmp_path, family, num_hidden_layers=2)
    with monkeypatch.context() as patched:
        patched.setattr(loaded_model, "select_kernels", lambda *_, **__: TorchKernels())
        whole = engine_config(tmp_path, "cpu", "float32", BLOCK_SIZE, NUM_BLOCKS, max_model_len=40)
        expected, followed = generate(ModelRunner(whole))
    with on_played_gpu(monkeypatch) as gpu:
        runner = make_runner(tmp_path)
        assert [str(each.device) for each in runner.ranks] == ["cuda:0", "cuda:1"]
        assert all(each.pool.shape[3] == 1 for each in runner.ranks), "of two heads one on each"
        calls = len(nccl.calls)
        found, matcher = generate(runner, gpu)
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
        runner = make_runner(tmp_path)

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(runner.ranks[1].decoder, "logits", fail)
        monkeypatch.setattr(runner.ranks[1].decoder, "forward", fail)
        with pytest.raises(DeviceLostError, match="out of memory"):
            generate(runner, gpu)


def make_runner(folder: Path) -> ModelRunner:
    config = engine_config(
        folder, "cuda", "float32", BLOCK_SIZE, NUM_BLOCKS, max_model_len=40, tensor_parallel_size=SIZE,
        max_step_seqs=9, max_decode_seqs=2, max_prefill_tokens=5,
    )  # fmt: skip
    runner = ModelRunner(config)
    runner.warm_up()
    return runner
