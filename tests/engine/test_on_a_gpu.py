"""The engine as it runs on a GPU, on one that is played: it starts, gives a CPU's tokens, and never waits for
the device between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import AfterLast, HandSequence, make_batch
from support.engines import engine_config
from support.families import VOCAB_SIZE
from support.gpu_runs import (
    BLOCK_SIZE,
    EDITED,
    NUM_BLOCKS,
    PLAIN,
    WAYS_TO_SAMPLE,
    generate,
    load,
    on_played_gpu,
)
from support.models import make_checkpoint
from support.played_gpu import OnGpu

from splitserve.bench.kernels import triton_interpreter
from splitserve.engine import loaded_model
from splitserve.engine.cache.device_blocks import DeviceBlocks
from splitserve.engine.engine_config import WARM_UP_TOKENS
from splitserve.engine.model import layer_mlp
from splitserve.engine.step.batch import SamplingState
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels.gpu import fp8_linear, fp8_rows
from splitserve.kernels.gpu.exact_linear import product_tile
from splitserve.kernels.gpu.quantised_linear import quantised_tile
from splitserve.kernels.interface import RoundingLinear
from splitserve.kernels.quantised import Scheme
from splitserve.kernels.reference import TorchKernels
from splitserve.kernels.torch_linear import TorchLinear
from splitserve.transport.live_environment import LiveDevice
from splitserve.transport.movers.checksum import checksums
from splitserve.transport.movers.opening import gpu_of
from splitserve.worker.settings import DEFAULT_BATCH_TOKENS

triton_interpreter.install()
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered")]


def test_a_worker_starts_and_steps_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Callable[[str, str, str], None]
) -> None:
    tried("qwen3", "gpu", "float32")
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: TorchKernels())
    expected, followed = generate(
        ModelRunner(engine_config(tmp_path, "cpu", "float32", BLOCK_SIZE, NUM_BLOCKS, max_model_len=40))
    )
    with on_played_gpu(monkeypatch) as gpu:
        model = load(tmp_path)
        assert isinstance(model.runner, ModelRunner)
        assert isinstance(model.runner.kv_cache.pool, OnGpu)
        assert not isinstance(model.pool, np.ndarray)
        assert gpu_of(model.pool) == torch.cuda.get_device_properties(0).uuid
        assert list(model.runner.phases.seconds) == [
            "fingerprint",
            "weights",
            "KV cache",
            "warm-up",
            "decode graphs",
            "prefill graphs",
            "grammar",
            "movers",
        ]
        assert gpu.num_page_locked_bytes < 64 << 10, "the KV cache has no copy in host memory"
        found, matcher = generate(model.runner, gpu)
        assert matcher.seen == followed.seen
        assert [len(output) for output in matcher.seen] == [0, 1, 2, 3, 4]
        sums = model.pool.checksums([9, 3])
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.token_ids.tolist() == other.token_ids.tolist(), step
        assert {row: reported.top_ids for row, reported in one.logprobs.items()} == {
            row: reported.top_ids for row, reported in other.logprobs.items()
        }
    held = model.runner.kv_cache.pool.as_subclass(torch.Tensor).view(torch.uint8).view(NUM_BLOCKS, 1, -1)
    assert sums == checksums(held.numpy(), [9, 3])


def test_a_vocabulary_that_serves_twice_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, tie_word_embeddings=True)
    with on_played_gpu(monkeypatch):
        runner = load(tmp_path).runner
        assert isinstance(runner, ModelRunner)
        table, head = runner._model.embed.table, runner._model._head
        assert isinstance(table, OnGpu)
        assert isinstance(head, TorchLinear)
        assert head._weight.data_ptr() == table.data_ptr()


def test_a_decode_step_sends_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    with on_played_gpu(monkeypatch) as gpu:
        runner = load(tmp_path).runner
        assert isinstance(runner, ModelRunner)
        rows = [(HandSequence([5, 7, 9], [block], PLAIN, 2), 1) for block in (4, 2)]
        first = make_batch(rows, BLOCK_SIZE)
        runner.execute(first)
        for sequence, _ in rows:
            sequence.num_computed += 1
            sequence.output.append(0)
        batch = replace(
            make_batch(rows, BLOCK_SIZE), sampling=first.sampling, fed_from=np.array([0, 1], np.int32)
        )
        sent = gpu.sent
        with gpu.launch():
            runner.launch(batch)
        assert gpu.sent == sent + 1


@pytest.mark.parametrize("num_tokens", [1, 4, 12], ids=["decode graph", "prefill graph", "launched"])
def test_what_a_step_sends_stays_as_it_is_while_two_are_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    with on_played_gpu(monkeypatch) as gpu:
        runner = load(tmp_path).runner
        assert isinstance(runner, ModelRunner)
        sequence, under_way = HandSequence(list(range(3, 40)), [9, 3, 5, 6, 7], PLAIN), []
        for start in (0, 12, 24):
            sequence.num_computed = start
            if len(under_way) == 2:
                under_way.pop(0)()
            batch = make_batch([(sequence, num_tokens)], BLOCK_SIZE)
            batch.sampling[:] = [SamplingState(PLAIN, [3] * (start + num_tokens), [])]
            with gpu.launch():
                under_way.append(runner.launch(batch))
        for wait in under_way:
            wait()


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_step_with_prompts_sends_one_copy_and_one_for_new_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_graph: bool
) -> None:
    """A decode row with penalties and edits beside a chunk that does not sample."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    with on_played_gpu(monkeypatch) as gpu:
        runner = load(tmp_path).runner
        assert isinstance(runner, ModelRunner)
        decoded = HandSequence([5, 7, 9], [4], EDITED, 2)
        chunks = HandSequence(list(range(3, 40)), [9, 3, 5, 6, 7])
        state, copies = None, []
        for _ in range(2):
            batch = make_batch([(decoded, 1), (chunks, 4 if in_graph else 12)], BLOCK_SIZE)
            assert batch.sampling[1] is None
            batch.sampling[0] = state = state or batch.sampling[0]
            before = gpu.sent
            with gpu.launch():
                tokens = runner.launch(batch)
            copies.append(gpu.sent - before)
            assert tokens().token_ids.tolist()[1] == -1
            decoded.num_computed += 1
            decoded.output.append(int(tokens().token_ids[0]))
            chunks.num_computed += batch.num_tokens - 1
        assert copies == [2, 1]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "exact", "scheme"),
    [("float32", "auto", False, "int8"), ("float16", "auto", True, None), ("bfloat16", "fp8", False, "fp8")],
)
def test_nothing_is_compiled_once_a_worker_is_ready(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    kv_dtype: Any,
    exact: bool,
    scheme: Scheme | None,
) -> None:
    """Steps of each kind, each way to sample, and what movers call."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    steps = ((1,), (3,), (1, 1), (1, 4), (1, 1, 2), (1,) * 6 + (2,), (1,) * 8 + (2,))
    with on_played_gpu(monkeypatch, exact, scheme) as gpu:
        monkeypatch.setattr(loaded_model, "numerics", lambda *_: "played")
        model = load(tmp_path, dtype, kv_dtype, exact)
        gpu.ready = True
        assert isinstance(model.runner, ModelRunner)
        for counts, params in zip(steps, (*WAYS_TO_SAMPLE, PLAIN, PLAIN), strict=True):
            rows = [
                (
                    HandSequence([5, 7, 9, 11], [block], params, 4 - count, matcher=AfterLast(VOCAB_SIZE)),
                    count,
                )
                for block, count in enumerate(counts)
            ]
            model.runner.execute(make_batch(rows, BLOCK_SIZE))
        assert not isinstance(model.pool, np.ndarray)
        LiveDevice(model.pool).write_test_block(6, (1, 2))
        model.pool.checksums([5, 2, 7])
        model.pool.unpack(model.pool.pack([3], slice(0, 1)), [4], slice(0, 1))


def test_inputs_of_float8_products_are_rounded_where_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All except those from attention, with one launch less each and the same bits."""
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    counts = []

    def counted(x: torch.Tensor) -> Any:
        counts[-1] += 1
        return fp8_rows.fp8_rows(x)

    monkeypatch.setattr(fp8_linear, "fp8_rows", counted)
    tokens = []
    for linear in (RoundingLinear, ModelRunner):  # no linear is a ModelRunner
        monkeypatch.setattr(layer_mlp, "RoundingLinear", linear)
        counts.append(0)
        with monkeypatch.context() as patch, on_played_gpu(patch, scheme="fp8") as gpu:
            runner = load(tmp_path, "bfloat16").runner
            assert isinstance(runner, ModelRunner)
            tokens.append([output.token_ids.tolist() for output in generate(runner, gpu)[0]])
    assert tokens[0] == tokens[1]
    assert counts[1] >= 4 * counts[0] > 0


@pytest.mark.parametrize("chosen", [1, 2, 4, 6, 8, 10])
def test_first_steps_compile_products_of_every_size(chosen: int) -> None:
    """Each token takes ``chosen`` experts; a decode step of one token is among the first."""
    budget = DEFAULT_BATCH_TOKENS["cuda"]
    for tile in (product_tile, quantised_tile, partial(quantised_tile, experts=True)):
        sizes = {tile(tokens * chosen) for tokens in range(1, budget + 1)}
        assert {tile(tokens * chosen) for tokens in (1, *WARM_UP_TOKENS, budget)} == sizes


def test_slices_of_any_width_are_copied_by_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their width follows the mover's measured rate."""
    with on_played_gpu(monkeypatch) as gpu:
        blocks = DeviceBlocks(torch.zeros((8, 5, 64), dtype=torch.uint8, device="cuda"))
        blocks.warm_up()
        gpu.ready = True
        for layers in (slice(2, 3), slice(0, 2), slice(1, 4), slice(0, 4), slice(0, 5)):
            for held in ([3], [4, 6, 5]):
                blocks.unpack(blocks.pack(held, layers), held, layers)


def test_a_variant_that_is_compiled_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_played_gpu(monkeypatch) as gpu:
        blocks = DeviceBlocks(torch.zeros((4, 3, 64), dtype=torch.uint8, device="cuda"))
        blocks.pack([1], slice(0, 1))
        gpu.ready = True
        with pytest.raises(AssertionError, match="compiled after the worker was ready: _copy_kernel"):
            blocks.unpack(torch.zeros(64, dtype=torch.uint8, device="cuda"), [1], slice(0, 1))
