"""What a transformers model answers, found from an answer that may be it."""

from __future__ import annotations

import torch


@torch.inference_mode()
def greedy_tokens(model: torch.nn.Module, prompt: list[int], answer: list[int], count: int) -> list[int]:
    """Return the ``count`` tokens that the model rates highest: after the prompt, and after each token of
    ``answer`` behind it. They are the answer if it is what the model gives greedily, and only then; and it
    takes one pass, where ``generate`` takes one for each token."""
    assert len(answer) == count
    logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    return [int(token) for token in logits.argmax(dim=-1)]
