"""The peer on a GPU: transformers' own continuous batching."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch


def transformers_us(path: Path, device: str, num_prompts: int, prompt_tokens: int, output_tokens: int) -> float:
    """Microseconds for so many prompts, all there at the start, with so many greedy tokens each: of the second run, for the first compiles
    and warms up. On a CPU its cache is a small one: it would take all memory."""
    import transformers

    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device)
    wanted = library.GenerationConfig(max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    options = {}
    if device == "cpu":
        options["continuous_batching_config"] = library.ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=256)
    prompts = [[5 + i] * prompt_tokens for i in range(num_prompts)]
    took = 0.0
    for _ in range(2):
        started = time.perf_counter()
        answers = model.generate_batch(prompts, generation_config=wanted, **options)
        took = (time.perf_counter() - started) * 1e6
        made = sum(len(answer.generated_tokens) for answer in answers.values())
        if made != num_prompts * output_tokens:
            raise RuntimeError(f"transformers made {made} tokens of {num_prompts * output_tokens}")
    del model
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    return took
