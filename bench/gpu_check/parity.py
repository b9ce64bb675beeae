"""Our logits and greedy tokens beside those of transformers, on the same device and checkpoint."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engine.model.weights import Checkpoint
from ...engine.step.decode_graphs import CudaRecorder
from ..kernels.engine_figures import BLOCK_SIZE, BareEngine, run_again
from ..kernels.exact_check import Span, batch_of
from ..kernels.kernel_inputs import relative_error
from .correctness import interpret
from .line import Line, Place, checked, left_out
from .machine import model_folder

FLOAT32_ERROR = 1e-4
BFLOAT16_RATIO = 2.0  # our error beside theirs, both against their float32


def parity(place: Place, family: str) -> Iterator[Line]:
    """Prefill in one piece, then decode by graphs; all with the product's model and kernels."""
    interpret(place)
    if find_spec("transformers") is None:
        yield left_out("parity", "transformers is not installed")
        return
    yield from _parity(place, family)


def _parity(place: Place, family: str) -> Iterator[Line]:
    folder = model_folder(place, family)
    prompt_len, steps = (700, 64) if place.big else (20, 4)
    ids = np.random.default_rng(5).integers(3, 300, prompt_len).tolist()
    expected, tokens = _theirs(folder, place.device, torch.float32, ids, steps)
    ours, our_tokens = _ours(place, folder, torch.float32, ids, steps)
    what = f"{family}, float32: logits of a prompt's last token"
    yield checked(what, relative_error(ours, expected), FLOAT32_ERROR)
    same = next((i for i, (a, b) in enumerate(zip(our_tokens, tokens, strict=True)) if a != b), steps)
    yield Line(f"{family}, float32: {same} of {steps} greedy tokens are transformers'", good=same == steps)
    theirs, _ = _theirs(folder, place.device, torch.bfloat16, ids, 0)
    ours, _ = _ours(place, folder, torch.bfloat16, ids, 0)
    error, their_error = relative_error(ours, expected), relative_error(theirs, expected)
    note = f"transformers' own error is {their_error:.1e}"
    yield checked(f"{family}, bfloat16: logits against float32", error, BFLOAT16_RATIO * their_error, note)


def _theirs(
    folder: Path, device: str, dtype: torch.dtype, ids: list[int], steps: int
) -> tuple[Tensor, list[int]]:
    """Logits float32 [1, vocab_size] of the last token, and ``steps`` greedy tokens."""
    import transformers

    library: Any = transformers
    load = library.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=dtype, attn_implementation="eager").to(device).eval()  # float32 without TF32
    prompt = torch.tensor([ids], device=device)
    with torch.inference_mode():
        logits = model(prompt).logits[:, -1].float().cpu()
        tokens: list[int] = []
        if steps:
            made = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=steps,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
            tokens = made[0, len(ids) :].tolist()
    del model
    gc.collect()
    return logits, tokens


def _ours(
    place: Place, folder: Path, dtype: torch.dtype, ids: list[int], steps: int
) -> tuple[Tensor, list[int]]:
    """The same of our own."""
    record = CudaRecorder() if place.big else run_again
    with Checkpoint(folder) as checkpoint:
        engine = BareEngine(
            json.loads((folder / "config.json").read_text()),
            torch.device(place.device),
            False,
            1024,
            (1, record),
            num_tokens=4096,
            checkpoint=checkpoint,
            dtype=dtype,
        )
    return greedy(engine, ids, steps)


def greedy(engine: BareEngine, ids: list[int], steps: int) -> tuple[Tensor, list[int]]:
    """Logits of the last token of ``ids``, and the ``steps`` greedy tokens after it, decoded one by one."""
    blocks = list(range(-(-(len(ids) + steps) // BLOCK_SIZE)))[::-1]
    logits = engine.step_logits(batch_of([Span(ids, blocks, 0, len(ids))])).cpu()
    known, last = list(ids), logits
    for _ in range(steps):
        known.append(int(last[0].argmax()))
        last = engine.decode_logits(batch_of([Span(known, blocks, len(known) - 1, len(known))])).cpu()
    return logits, known[len(ids) :]
