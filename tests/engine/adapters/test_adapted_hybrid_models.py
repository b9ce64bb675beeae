"""Adapters of models with recurrent layers: of their projections, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.adapters import save_adapter
from support.engines import engine_config
from support.families import VOCAB_SIZE
from support.models import make_checkpoint
from support.states import HybridSequence, num_state_blocks, run

from splitserve.engine.adapters.files import read_adapter
from splitserve.engine.adapters.resident import ResidentAdapters
from splitserve.engine.step.model_runner import ModelRunner

ATTENTION = r"(?!.*visual).*\.(self_attn\.(q|k|v|o)_proj|linear_attn\.(in_proj_(qkvz|ba|qkv|z|b|a)|out_proj)"
LAYERS = {
    "granite_hybrid": r".*\.([qkvo]_proj|mamba\.(in|out)_proj|shared_mlp\.(input|output)_linear)",
    "nemotron_h": r".*\.([qkvo]_proj|in_proj|mixer\.(up|down)_proj)",  # peft refuses out_proj
    "qwen3_next": rf"{ATTENTION})",  # peft would change experts
    "qwen3_5_images": rf"{ATTENTION}|mlp\.(gate|up|down)_proj)",
    "lfm2": r".*\.(self_attn\.(q|k|v|out)_proj|conv\.(in|out)_proj|feed_forward\.w[123])",
}
NUM_TOKENS = 10


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", sorted(LAYERS))
def test_one_of_two_sequences_has_an_adapter(family: str, size: int, tmp_path: Path) -> None:
    """Logits: an adapter changes them by far more than rounding does."""
    model = make_checkpoint(tmp_path / "model", family)
    prompts = [list(range(seed, VOCAB_SIZE, 7)) for seed in (1, 2)]
    expected = [greedy(model, prompts[0])]
    adapted = save_adapter(model, tmp_path / "adapter", 11, target_modules=LAYERS[family])
    expected.append(greedy(adapted, prompts[1]))
    assert expected[1] != greedy(adapted.unload(), prompts[1])
    config = engine_config(
        tmp_path / "model", "cpu", "float32", 16, 80, lora_folder=tmp_path, max_loras=2,
        tensor_parallel_size=size,
    )  # fmt: skip
    runner = ModelRunner(config)
    file, resident = read_adapter(tmp_path / "adapter"), ResidentAdapters(runner.ranks)
    resident.check(file)
    resident.put(1, file)
    states = 3 * num_state_blocks(runner)
    sequences = [
        HybridSequence(
            prompt, list(range(first, first + 5)), states=list(range(first + 5, first + 5 + states)),
            adapter=adapter,
        )
        for first, prompt, adapter in zip((0, 40), prompts, ("", file.content), strict=True)
    ]  # fmt: skip
    run(runner, [(s, 20 + i) for i, s in enumerate(sequences)])
    while len(sequences[0].output) < NUM_TOKENS:
        run(runner, [(s, len(s.token_ids) - s.num_computed) for s in sequences])
    assert [s.output for s in sequences] == expected


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
