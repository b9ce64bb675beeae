"""KV blocks of latent attention lie on one rank each: ranks compute together what one computes alone."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine.ranks.played_nccl import PlayedNccl
from engine.ranks.test_split_models import decoded, make_runner, moved, prefill, random_tokens, step
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.gpu_runs import BLOCK_SIZE, NUM_BLOCKS, generate, load, on_played_gpu
from support.greedy import greedy_tokens
from support.models import make_checkpoint

from splitserve.bench.kernels import triton_interpreter
from splitserve.engine import loaded_model
from splitserve.engine.cache.sharded_blocks import ShardedBlocks
from splitserve.engine.model import block_spread, latent_chunks
from splitserve.engine.model.block_spread import BlockSpread
from splitserve.engine.model.ranks import Rank
from splitserve.engine.ranks import threads
from splitserve.engine.ranks.host import HostRank, mailboxes
from splitserve.engine.ranks.nccl import Communicators
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.interface import AttentionInputs, Kernels
from splitserve.kernels.native_cpu import NativeCpuKernels
from splitserve.kernels.reference import TorchKernels

triton_interpreter.install()
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered")]
REFERENCE = TorchKernels()


def kernels_of(name: str) -> Kernels:
    if name == "cpu":
        return NativeCpuKernels(1, "generic")
    return CudaKernels(num_sms=5) if name == "gpu" else REFERENCE


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("kernels", "dtype", "error"),
    [
        ("torch", torch.float32, 1e-5),
        ("cpu", torch.float32, 1e-5),
        ("cpu", torch.bfloat16, 1e-2),
        ("gpu", torch.float32, 1e-5),
    ],
)
def test_merged_sums_are_those_of_one_rank(
    kernels: str, dtype: torch.dtype, error: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows' blocks lie on all ranks or on some; the last row is padding. Blocks of no sequence, and
    places behind a sequence's end, hold NaN."""
    monkeypatch.setattr(block_spread, "ROWS_AT_ONCE", 3)
    tables = [[3, 5, 0, 8, 6], [4, 12, 0, 0, 0], [7, 8, 0, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0]]
    lengths, num_heads, width = [37, 16, 9, 3, 0], 8, 24
    random = torch.Generator().manual_seed(1)
    pool = torch.randn(13, 2, 1, 1, BLOCK_SIZE, width, generator=random).to(dtype)
    pool[[9, 10, 11, 2]] = torch.nan
    pool[1, :, :, :, 3:] = torch.nan
    q = torch.randn(5, num_heads, width, generator=random).to(dtype)
    inputs = AttentionInputs(
        torch.arange(6, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32),
        torch.where(
            torch.arange(5) * BLOCK_SIZE < torch.tensor(lengths)[:, None], torch.tensor(tables), -(1 << 30)
        ).int(), scale=0.3, max_query_len=1,
    )  # fmt: skip
    whole = REFERENCE.paged_attention(q[:4], pool, 1, replace(
        inputs, query_start_loc=torch.arange(5, dtype=torch.int32), seq_lens=inputs.seq_lens[:4], plans={}
    ))  # fmt: skip
    boxes, heads, own_kernels = mailboxes(size), num_heads // size, kernels_of(kernels)
    interpreting = threading.Lock()  # its grid is a global; the C++ has one pool of helpers

    def run(number: int) -> torch.Tensor:
        spread = BlockSpread(HostRank(number, boxes), BLOCK_SIZE)
        own, mine, found = pool[number::size], spread.own_inputs(inputs), []
        if kernels == "gpu":
            own = own.contiguous()
        for rows, part in spread.slices(mine):
            queries = spread.queries(q[rows, number * heads : (number + 1) * heads])
            with interpreting:
                own_kernels.use_this_thread()
                sums, lse = own_kernels.partial_attention(queries, own, 1, part)
            found.append(spread.merged(sums.view(len(queries), -1, width), lse))
        return torch.cat(found)

    with ThreadPoolExecutor(size) as ranks:
        merged = torch.cat([*ranks.map(run, range(size))], dim=1)
    assert not merged[4].any(), "padding"
    difference = merged[:4].flatten(1).float() - whole.float()
    assert difference.norm() < error * whole.float().norm()


def test_slots_are_written_by_the_owner_of_their_block() -> None:
    slots = torch.tensor([0, 7, 8, 23, 24, 47, -1])
    found = [BlockSpread(Rank(number, 2), BLOCK_SIZE).own_slots(slots).tolist() for number in (0, 1)]
    assert found == [[0, 7, -1, 15, -1, -1, -1], [-1, -1, 0, -1, 8, 23, -1]]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("chunk", [75, 40, 7])
def test_logits_are_those_of_transformers(size: int, chunk: int, tmp_path: Path) -> None:
    """A prompt runs in one chunk or several, beside a decode row."""
    reference, prompt = make_checkpoint(tmp_path, "deepseek3"), random_tokens(75, seed=11)
    runner = make_runner(tmp_path, size)
    beside = prefill(runner, random_tokens(33, seed=12), 33, first_block=20)
    sequence, found = HandSequence(prompt, [3, 1, 11, 8, 14]), []
    while sequence.num_computed < len(prompt):
        count = min(chunk, len(prompt) - sequence.num_computed)
        batch = make_batch([(beside, 1), (sequence, count)], 16, prompt_logprobs=0)
        output = runner.execute(batch)
        found += [entry.logprob for entry in output.prompt_logprobs[1]]
        beside.num_computed += 1
        beside.output.append(int(output.token_ids[0]))
        sequence.num_computed += count
    with torch.inference_mode():
        logprobs = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [logprobs[i, token].item() for i, token in enumerate(prompt[1:])]
    np.testing.assert_allclose(found, expected, atol=2e-4)
    expected_beside = greedy_tokens(reference, beside.prompt, beside.output, len(beside.output))
    assert beside.output == expected_beside


def test_in_slices_and_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows share a step in slices; contexts are brought to all ranks in groups."""
    monkeypatch.setattr(block_spread, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(latent_chunks, "GATHERED_TOKENS", 50)
    groups = latent_chunks._groups(torch.tensor([1, 0, 1, 1]).bool(), torch.tensor([30, 9, 30, 10]))
    assert [group.tolist() for group in groups] == [[1, 0, 0, 0], [0, 0, 1, 1]]
    make_checkpoint(tmp_path, "deepseek2")
    found = []
    for size in (1, 2):
        runner = make_runner(tmp_path, size)
        lengths = ((40, 6), (40, 40), (30, 1), (20, 40), (0, 30), (3, 1))
        blocks = np.random.default_rng(3).permutation(32).tolist()
        sequences = [
            HandSequence(random_tokens(sum(of), seed=i), [blocks.pop() for _ in range(-(-sum(of) // 16))])
            for i, of in enumerate(lengths)
        ]
        before = [(s, of[0]) for s, of in zip(sequences, lengths, strict=True) if of[0]]
        runner.execute(make_batch(before, 16))
        for s, of in zip(sequences, lengths, strict=True):
            s.num_computed = of[0]
        whole = [(s, of[1]) for s, of in zip(sequences, lengths, strict=True)]
        output = runner.execute(make_batch(whole, 16, prompt_logprobs=0))
        found.append(
            [[entry.logprob for entry in output.prompt_logprobs[i]] for i in range(len(lengths))]
            + [output.token_ids.tolist()]
        )
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(("of", "to"), [*itertools.product((1, 2, 4), repeat=2)])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_a_cached_prefix_is_handed_over(of: int, to: int, kv_dtype: str, tmp_path: Path) -> None:
    """Its last block, which is not full, too; there another prompt goes on from its full blocks."""
    dtype = "float32" if kv_dtype == "auto" else "bfloat16"
    reference, prompt = make_checkpoint(tmp_path, "deepseek2"), random_tokens(75, seed=13)
    source, target = (make_runner(tmp_path, size, dtype, kv_dtype=kv_dtype) for size in (of, to))
    here = prefill(source, prompt, 33, first_block=3)
    there = moved(source, target, here)
    other = HandSequence([*prompt[:64], *random_tokens(9, seed=14)], [*there.blocks[:4], 27, 31, 29])
    other.num_computed = 64
    step(target, other, 9)
    found = decoded(target, there), decoded(target, other)
    if kv_dtype == "auto":
        for sequence, tokens in zip((there, other), found, strict=True):
            assert tokens == greedy_tokens(reference, sequence.prompt, tokens, len(tokens))
    assert len({*found[0], *found[1]}) > 3


def played_gpus(monkeypatch: pytest.MonkeyPatch, size: int) -> PlayedNccl:
    library = PlayedNccl(size)
    monkeypatch.setattr(threads, "Communicators", lambda size: Communicators(size, library, lambda: 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: size)
    return library


def test_a_worker_of_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds half of the blocks. Its decode steps are recorded."""
    make_checkpoint(tmp_path, "deepseek2", num_hidden_layers=2)
    with monkeypatch.context() as patched:
        patched.setattr(loaded_model, "select_kernels", lambda *_, **__: TorchKernels())
        whole = engine_config(tmp_path, "cpu", "float32", BLOCK_SIZE, NUM_BLOCKS, max_model_len=40)
        alone = ModelRunner(whole)
        expected, _ = generate(alone)
    with on_played_gpu(monkeypatch) as gpu:
        nccl = played_gpus(monkeypatch, 2)
        model = load(tmp_path, num_gpus=2)
        runner = model.runner
        assert isinstance(runner, ModelRunner)
        assert [len(each.pool) for each in runner.ranks] == [NUM_BLOCKS // 2] * 2
        assert model.num_blocks == NUM_BLOCKS
        assert runner._graphs is not None
        for each in runner.ranks:
            each.pool.fill_(torch.nan)
        gpu.ready = True
        calls = len(nccl.calls)
        found, _ = generate(runner, gpu)
        assert isinstance(model.pool, ShardedBlocks)
        held = model.pool.pack([9, 3], slice(0, 1)).cpu().view(torch.float32).view(2, -1)
    written = alone.kv_cache.pool[[9, 3], :1].flatten(1)
    torch.testing.assert_close(held[0], written[0], rtol=1e-3, atol=1e-3)
    assert held[1].isnan().any()
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
    assert {"sum", "gather", "broadcast", "exchange"} == set(nccl.calls[calls:])
