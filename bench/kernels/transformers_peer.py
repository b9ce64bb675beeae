"""The peer on a GPU: transformers' own continuous batching, in a process of its own: whatever becomes of it,
our figures stand.

python -m splitserve.bench.kernels.transformers_peer FOLDER DEVICE PROMPTS PROMPT_TOKENS OUTPUT_TOKENS    #
prints microseconds
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

PATIENCE_S = 150.0  # importing, loading, compiling, and two runs


class PeerFailed(Exception):
    """The peer gave no figure; the message has the reason."""


def peer_us(path: Path, device: str, num_prompts: int, prompt_tokens: int, output_tokens: int) -> float:
    """``transformers_us`` of another process. Raises PeerFailed."""
    sizes = [str(number) for number in (num_prompts, prompt_tokens, output_tokens)]
    command = [sys.executable, "-m", f"{__package__}.transformers_peer", str(path), device, *sizes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired as late:
        raise PeerFailed(f"transformers did not answer within {PATIENCE_S:.0f} s") from late
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise PeerFailed(lines[-1] if lines else f"it ended with {done.returncode}")
    return float(done.stdout.split()[-1])


def transformers_us(
    path: Path, device: str, num_prompts: int, prompt_tokens: int, output_tokens: int
) -> float:
    """Microseconds for a batch of prompts with greedy tokens: of the second run, after one warm-up. On a CPU
    its cache is small, because it would take all memory."""
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device)
    wanted = library.GenerationConfig(
        max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    options = {}
    if device == "cpu":
        options["continuous_batching_config"] = library.ContinuousBatchingConfig(
            page_size=16, num_blocks=64, max_batch_tokens=256
        )
    prompts = [[5 + i] * prompt_tokens for i in range(num_prompts)]
    took = 0.0
    for _ in range(2):
        started = time.perf_counter()
        answers = model.generate_batch(prompts, generation_config=wanted, **options)
        took = (time.perf_counter() - started) * 1e6
        made = sum(len(answer.generated_tokens) for answer in answers.values())
        if made != num_prompts * output_tokens:
            raise RuntimeError(f"transformers made {made} tokens of {num_prompts * output_tokens}")
    return took


if __name__ == "__main__":
    import transformers

    print(f"transformers {transformers.__version__}", file=sys.stderr)
    print(transformers_us(Path(sys.argv[1]), sys.argv[2], *(int(number) for number in sys.argv[3:])))
