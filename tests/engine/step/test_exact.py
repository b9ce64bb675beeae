"""Exact mode: a request's logits and tokens are the same bits alone, in a batch, in chunks, over cached
prefixes, on another worker."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.families import VOCAB_SIZE
from support.models import make_checkpoint

from splitserve.engine.errors import ModelConfigError
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.kernels import select
from splitserve.transport.messages.messages import SamplingParams, TokenLogprobs

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)

BLOCK_SIZE = 8
NUM_BLOCKS = 1300
MAX_BLOCKS = 16  # of one sequence
PROMPT_LEN, NUM_TOKENS = 75, 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
SAMPLED = SamplingParams(
    max_tokens=NUM_TOKENS,
    temperature=1.3,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias={7: 1.5},
    seed=99,
    logprobs=3,
)


FAMILIES = [
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "cohere2",
    "cohere_plus",
    "deepseek2",
    "glm_moe_dsa",
    "hunyuan",
    "ministral3",
    "qwen2_moe",
    "gpt_oss",
    "ernie4_5_moe",
    "minimax_m2",
    "granite_moe_shared",
]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norms of heads and tied embeddings; a sliding window and heads of 24; gelu and norms on both
    sides of a layer's parts; experts; sinks; queries that change behind rope."""
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, request.param, vocab_size=VOCAB_SIZE + 3)  # rows of logits begin at odd addresses
    return path


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, folder: Path) -> ModelRunner:
    return make_runner(folder, request.param)


def make_runner(folder: Path, dtype: str, num_threads: int = 1) -> ModelRunner:
    config = engine_config(folder, "cpu", dtype, BLOCK_SIZE, NUM_BLOCKS, threads=num_threads, exact=True)
    runner = ModelRunner(config)
    runner.kv_cache.pool.fill_(torch.nan)
    return runner


class Request:
    """One sequence that is run to its end, and every logit row it was sampled from."""

    def __init__(self, params: SamplingParams, seed: int, place: int) -> None:
        prompt = [int(t) for t in np.random.default_rng(seed).integers(0, VOCAB_SIZE, PROMPT_LEN + seed % 9)]
        self.sequence = HandSequence(
            prompt, [place * MAX_BLOCKS + i for i in range(MAX_BLOCKS)], replace(params, seed=seed)
        )
        self.logits: list[torch.Tensor] = []
        self.logprobs: list[TokenLogprobs | None] = []

    def same(self, other: Request) -> bool:
        mine, theirs = self.sequence, other.sequence
        assert mine.prompt == theirs.prompt
        return (
            mine.output == theirs.output
            and self.logprobs == other.logprobs
            and all(torch.equal(a, b) for a, b in zip(self.logits, other.logits, strict=True))
        )


def step(runner: ModelRunner, work: list[tuple[Request, int]], num_rows: int = 0) -> None:
    """Runs the next ``n`` tokens of each request; keeps logits and tokens of those that were sampled.
    ``num_rows``: number of decode rows of one scheduler; the others are another one's."""
    batch = make_batch([(r.sequence, n) for r, n in work[num_rows:]], BLOCK_SIZE)
    if num_rows:
        rows = make_batch([(r.sequence, n) for r, n in work[:num_rows]], BLOCK_SIZE)
        batch = rows.followed_by(batch)
    kept: list[torch.Tensor] = []
    model = runner._model
    compute = model.logits

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        kept.append(compute(hidden))
        return kept[-1].clone()

    model.logits = keep  # type: ignore[method-assign]
    try:
        outputs = runner.execute(batch).split(num_rows)
    finally:
        model.logits = compute  # type: ignore[method-assign]
    logit_rows = iter(kept[0] if kept else ())
    sampled = [
        (int(token), output.logprobs.get(i)) for output in outputs for i, token in enumerate(output.token_ids)
    ]
    for (request, count), (token, logprobs) in zip(work, sampled, strict=True):
        request.sequence.num_computed += count
        if token >= 0:
            request.sequence.output.append(token)
            request.logits.append(next(logit_rows))
            request.logprobs.append(logprobs)


def prefill(runner: ModelRunner, request: Request, *chunks: int) -> None:
    """In chunks of these sizes, the last of which is repeated."""
    sizes, end = [*chunks], len(request.sequence.token_ids)
    while (left := end - request.sequence.num_computed) > 0:
        step(runner, [(request, min(left, sizes.pop(0) if len(sizes) > 1 else sizes[0]))])


def decode(runner: ModelRunner, requests: list[Request]) -> None:
    while len(requests[0].sequence.output) < NUM_TOKENS:
        step(runner, [(request, 1) for request in requests])


@pytest.fixture(scope="module", params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def params(request: pytest.FixtureRequest) -> SamplingParams:
    value: SamplingParams = request.param
    return value


@pytest.fixture(scope="module")
def expected(runner: ModelRunner, params: SamplingParams) -> Request:
    """The request alone, its prompt in one piece."""
    request = Request(params, seed=5, place=0)
    prefill(runner, request, 1000)
    decode(runner, [request])
    return request


def test_in_a_batch_of_64(runner: ModelRunner, expected: Request, params: SamplingParams) -> None:
    requests = [Request(params if i % 2 else GREEDY, seed=i, place=i) for i in range(64)]
    requests[37] = Request(params, seed=5, place=37)
    for first in range(0, 64, 16):
        step(
            runner, [(r, len(r.sequence.prompt)) for r in requests[first : first + 16]]
        )  # prompts side by side, too
    decode(runner, requests)
    assert requests[37].same(expected)


@pytest.mark.parametrize("chunks", [(1,), (7, 1, 30), (64,), (40, 3)])
def test_in_chunks(
    runner: ModelRunner, expected: Request, params: SamplingParams, chunks: tuple[int, ...]
) -> None:
    request = Request(params, seed=5, place=1)
    prefill(runner, request, *chunks)
    decode(runner, [request])
    assert request.same(expected)


def test_in_one_step_with_others(runner: ModelRunner, expected: Request, params: SamplingParams) -> None:
    """Its prompt in chunks beside others' decode rows, then its own row beside chunks of others' prompts."""
    request = Request(params, seed=5, place=1)
    rows = [Request(params if i % 2 else GREEDY, seed=20 + i, place=10 + i) for i in range(3)]
    for row in rows:
        prefill(runner, row, 1000)
    for size in (7, 1, 30, 1000):
        left = len(request.sequence.prompt) - request.sequence.num_computed
        step(runner, [*((row, 1) for row in rows), (request, min(size, left))], num_rows=len(rows))
    rows = [rows[0], request]
    for place in range(20, 40):
        other = Request(params if place % 2 else GREEDY, seed=place, place=place)
        while (left := len(other.sequence.token_ids) - other.sequence.num_computed) > 0:
            if len(request.sequence.output) == NUM_TOKENS:
                assert request.same(expected)
                return
            step(runner, [*((row, 1) for row in rows), (other, min(29, left))], num_rows=len(rows))
            if other.sequence.output:
                break
    raise AssertionError("too few steps")


def test_with_drafts(runner: ModelRunner, expected: Request, params: SamplingParams) -> None:
    """Four rows of a step are one sequence's next tokens; in every other step the second draft is wrong."""
    request, is_wrong = Request(params, seed=5, place=4), False
    prefill(runner, request, 1000)
    while (at := len(request.sequence.output)) < NUM_TOKENS:
        drafts = expected.sequence.output[at : at + 3]
        if is_wrong := not is_wrong:
            drafts[1:] = [(token + 1) % VOCAB_SIZE for token in drafts[1:]]
        rows = []
        for count in range(min(4, NUM_TOKENS - at)):
            row = Request(params, seed=5, place=4)
            row.sequence.output = request.sequence.output + drafts[:count]
            row.sequence.num_computed = request.sequence.num_computed + count
            rows.append(row)
        step(runner, [(row, 1) for row in rows])
        for count, row in enumerate(rows):
            if drafts[:count] == expected.sequence.output[at : at + count]:
                request.sequence.output.append(row.sequence.output[-1])
                request.sequence.num_computed += 1
                request.logits += row.logits
                request.logprobs += row.logprobs
    assert request.same(expected)


def test_over_a_cached_prefix(runner: ModelRunner, expected: Request, params: SamplingParams) -> None:
    other = Request(GREEDY, seed=5, place=2)
    prefill(runner, other, 33)
    request = Request(params, seed=5, place=3)
    request.sequence.blocks[:6] = other.sequence.blocks[:6]
    request.sequence.num_computed = 6 * BLOCK_SIZE
    prefill(runner, request, 1000)
    decode(runner, [request])
    assert request.same(expected)


def test_prefilled_here_decoded_there_with_more_threads(
    runner: ModelRunner, expected: Request, folder: Path, params: SamplingParams
) -> None:
    there = make_runner(folder, str(runner.loaded.dtype).removeprefix("torch."), num_threads=3)
    request = Request(params, seed=5, place=4)
    prefill(runner, request, 20)
    blocks = request.sequence.blocks
    there.kv_cache.block_bytes_view[blocks] = runner.kv_cache.block_bytes_view[blocks]
    decode(there, [request])
    native_cpu._cpu.set_num_threads(1)
    assert request.same(expected)


def test_after_a_loss_with_the_output_as_part_of_the_prompt(
    runner: ModelRunner, expected: Request, params: SamplingParams
) -> None:
    request = Request(params, seed=5, place=5)
    prefill(runner, request, 1000)
    while len(request.sequence.output) < 11:
        step(runner, [(request, 1)])
    request.sequence.num_computed = (
        0  # all its blocks are gone; it is dispatched with the tokens that the client has
    )
    request.sequence.blocks = [6 * MAX_BLOCKS + i for i in range(MAX_BLOCKS)]
    prefill(runner, request, 29)
    decode(runner, [request])
    assert request.same(expected)


def test_prompt_logprobs_do_not_depend_on_chunks(runner: ModelRunner) -> None:
    reported: list[list[TokenLogprobs]] = []
    for place, sizes in enumerate(([1000], [31, 9, 1000])):
        request = Request(GREEDY, seed=3, place=place)
        sequence, found = request.sequence, []
        for size in sizes:
            count = min(size, len(sequence.prompt) - sequence.num_computed)
            output = runner.execute(make_batch([(sequence, count)], BLOCK_SIZE, prompt_logprobs=2))
            sequence.num_computed += count
            found += output.prompt_logprobs[0]
        reported.append(found)
    assert reported[0] == reported[1]


def test_exact_says_what_it_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "splitserve.kernels.cuda", None)
    with pytest.raises(select.UnsuitableKernelsError, match=r"pip install triton"):
        select.select_kernels(torch.device("cuda"), 1, exact=True)
    monkeypatch.setitem(sys.modules, "splitserve.kernels.native_cpu", None)
    with pytest.raises(ModelConfigError, match=r"C\+\+ compiler"):
        ModelRunner(engine_config(folder, "cpu", num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, exact=True))
