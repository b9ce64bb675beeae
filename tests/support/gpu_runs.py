"""Workers of small models on a played GPU, and a run of steps of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from support.batches import AfterLast, HandSequence, make_batch
from support.families import VOCAB_SIZE
from support.played_gpu import PlayedGpu, played_gpu
from triton import next_power_of_2

from splitserve.engine import loaded_model
from splitserve.engine.load_model import load_model
from splitserve.engine.settings import WorkerSettings
from splitserve.engine.step import model_runner, prefill_graphs, warm_up
from splitserve.engine.step.batch import StepOutput
from splitserve.engine.step.model_runner import ModelRunner
from splitserve.engine.worker_model import WorkerModel
from splitserve.kernels.cuda import CudaKernels
from splitserve.kernels.gpu import decode_plan, prefill_attention
from splitserve.kernels.gpu.attention_tiles import TileShape
from splitserve.kernels.quantised import Scheme
from splitserve.transport.messages.messages import SamplingParams

BLOCK_SIZE, NUM_BLOCKS = 8, 24
PLAIN = SamplingParams(max_tokens=9, temperature=0.8, seed=3)
WAYS_TO_SAMPLE = (
    PLAIN,
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=0.4),
    SamplingParams(max_tokens=9, top_p=0.9, seed=1),
    SamplingParams(max_tokens=9, top_k=3, min_p=0.1, logit_bias={3: 1.0}, logprobs=2, seed=1),
)
EDITED = SamplingParams(
    max_tokens=9, temperature=1.2, seed=4, min_p=0.01, repetition_penalty=1.3, frequency_penalty=0.4,
    min_tokens=2, logprobs=2,
)  # fmt: skip


@contextmanager
def on_played_gpu(
    monkeypatch: pytest.MonkeyPatch, exact: bool = False, scheme: Scheme | None = None
) -> Iterator[PlayedGpu]:
    kernels = CudaKernels(num_sms=1, exact=exact, scheme=scheme, prefill_shape=TileShape(16, 32, 4, 3))
    with played_gpu(monkeypatch) as gpu:
        monkeypatch.setattr(loaded_model, "select_kernels", lambda *_, **__: kernels)
        monkeypatch.setattr(model_runner, "WARM_UP_TOKENS", (2, 3))
        monkeypatch.setattr(warm_up, "MANY_SEQS", 3)
        monkeypatch.setattr(warm_up, "LARGE_SEQS", 5)
        for plans in (decode_plan, prefill_attention):
            monkeypatch.setattr(
                plans, "padded_seqs", lambda seqs: 2 if seqs < 3 else max(4, next_power_of_2(seqs))
            )
        monkeypatch.setattr(prefill_graphs, "TOKEN_BUCKETS", (8,))
        monkeypatch.setattr(prefill_graphs, "seconds", lambda *_: 1.0)
        monkeypatch.setattr(prefill_graphs, "FASTER", 2)
        monkeypatch.setattr(model_runner, "CudaRecorder", lambda _: gpu.record)
        yield gpu


def load(
    folder: Path,
    dtype: str = "float32",
    kv_dtype: Literal["auto", "fp8"] = "auto",
    exact: bool = False,
    num_gpus: int = 1,
    **more: Any,
) -> WorkerModel:
    settings = WorkerSettings(
        model=folder,
        insecure=True,
        device="cuda",
        dtype=dtype,
        kv_dtype=kv_dtype,
        exact=exact,
        tensor_parallel_size=num_gpus,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=40,
        **more,
    )
    return load_model(settings, max_decode_seqs=2, prefill_tokens=lambda _: 5, max_step_seqs=9)


def generate(
    runner: ModelRunner, gpu: PlayedGpu | None = None, adapters: Sequence[str] = ("", "")
) -> tuple[list[StepOutput], AfterLast]:
    """Two prompts with these adapters, one of them in two chunks; then steps of both, and of one, which
    follows a grammar. On a GPU each of these is launched before the tokens of the one before are read."""
    random, matcher = np.random.default_rng(4), AfterLast(VOCAB_SIZE)
    long = HandSequence(random.integers(0, VOCAB_SIZE, 10).tolist(), [9, 3], EDITED, adapter=adapters[0])
    prompt = random.integers(0, VOCAB_SIZE, 4).tolist()
    short = HandSequence(prompt, [1], PLAIN, matcher=matcher, adapter=adapters[1])
    reported: list[StepOutput] = []
    pending: list[tuple[list[tuple[HandSequence, int]], Callable[[], StepOutput]]] = []

    def collect() -> None:
        sampled, wait = pending.pop(0)
        reported.append(wait())
        tokens = [token for token in reported[-1].token_ids.tolist() if token >= 0]
        for (sequence, at), token in zip(sampled, tokens, strict=True):
            sequence.output[at] = token

    steps = [
        ([long], [7], None),
        ([long, short], [3, 4], None),
        *([([long, short], [1, 1], [0, 1])] * 3),
        ([short], [1], [1]),
    ]
    for sequences, counts, rows in steps:
        while pending and (gpu is None or rows is None or len(pending) > 1):
            collect()
        batch = make_batch(list(zip(sequences, counts, strict=True)), BLOCK_SIZE)
        if gpu is not None and rows is not None:
            batch = replace(
                batch, token_ids=np.zeros_like(batch.token_ids), fed_from=np.array(rows, np.int32)
            )
        with nullcontext() if gpu is None else gpu.launch():
            wait = runner.launch(batch, (lambda _: None) if rows is None else None)
        sampled = []
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.num_computed += count
            if sequence.num_computed == len(sequence.token_ids):
                sampled.append((sequence, len(sequence.output)))
                sequence.output.append(-1)  # nobody knows it yet
        pending.append((sampled, wait))
    while pending:
        collect()
    return reported, matcher
