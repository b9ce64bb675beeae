"""Workers of one rank and of two, over which the KV blocks of latent attention are spread: blocks go both
ways, and what is generated is what transformers would choose, also after a worker's death."""

from __future__ import annotations

import os
import signal
from itertools import islice
from pathlib import Path

import torch
from e2e.cluster import MODEL_NAME, NEVER_DEAD, Cluster, running
from e2e.test_hybrid import streamed
from support.models import make_checkpoint
from transformers import PreTrainedModel

RANKS = ("--prefill-tensor-parallel-size", "1", "--decode-tensor-parallel-size", "2")
NUM_TOKENS = 300


def check(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    torch.testing.assert_close(chosen, logits.amax(1), rtol=0, atol=1e-3)


def num_cached(cluster: Cluster, prompt: list[int]) -> int:
    answer = cluster.client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=1, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_streams_and_cached_blocks(tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    run.mkdir()
    reference = make_checkpoint(model, "deepseek3", max_position_embeddings=1024)
    arguments = ("--decode", "2", "--num-blocks", "160", "--block-size", "16", "--dtype", "float32")
    with running(model, run, *arguments, *RANKS, *NEVER_DEAD) as cluster:
        cluster.wait_whole(1, 2)
        prompt = [(i * 13 + i // 7) % 250 for i in range(100)]
        stream = streamed(cluster, prompt, NUM_TOKENS)
        answer = [*islice(stream, 20)]
        os.kill(cluster.busy_worker("decode")["pid"], signal.SIGKILL)
        answer += stream
        assert len(answer) == NUM_TOKENS
        check(reference, prompt, answer)
        cluster.wait_reported()
        turn = [*prompt, *answer, 7]
        assert num_cached(cluster, turn) == (len(turn) - 2) // 16 * 16, "the answer's blocks are pulled"
        other = [*streamed(cluster, [*turn, 9], 20)]
        check(reference, [*turn, 9], other)
        cluster.wait_whole(1, 2)
        cluster.wait_at_rest()
