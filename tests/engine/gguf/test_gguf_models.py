"""A GGUF file is served as the function of its dequantised weights that transformers computes in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.gguf_checkpoints import write_gguf
from support.greedy import greedy_tokens
from support.models import make_checkpoint
from support.quantised_models import (
    PROMPT_LEN,
    all_logits,
    answer,
    assert_same_function,
    make_runner,
    random_tokens,
)
from transformers import PreTrainedModel

from splitserve.engine.gguf.folder import write_folder
from splitserve.engine.model.gguf_blocks import weight_of_blocks
from splitserve.engine.model.gguf_types import BLOCKS, packed_bytes
from splitserve.engine.model.model_folder import check_model_folder, content_names
from splitserve.engine.model.weights import Checkpoint

native_cpu = pytest.importorskip(
    "splitserve.kernels.native_cpu", reason="the C++ kernels were not built", exc_type=ImportError
)
GEMMA_2_KEYS = {
    "attention.sliding_window": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 60.0,
}
GRANITE_KEYS = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.1, "logit_scale": 8.0}
GEMMA_3_KEYS = {
    "attention.sliding_window": 24,
    "attention.sliding_window_pattern": [True, False, True],
    "rope.freq_base_swa": 1e3,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama2": ("llama", {}, {}),
    "llama3": ("llama", {}, {}),
    "llama_linear": ("llama", {}, {}),
    "mixtral": ("llama", {"intermediate_size": 64}, {"expert_count": 4, "expert_used_count": 2}),
    "qwen2_moe": (
        "qwen2moe",
        {"decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 64},
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 64,
        },
    ),
    "qwen3_moe": (
        "qwen3moe",
        {"moe_intermediate_size": 64, "head_dim": 32},
        {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 64},
    ),
    "llama_biases": ("llama", {"mlp_bias": False}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2_yarn": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32, "head_dim": 32}, GEMMA_2_KEYS),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 32, "head_dim": 32}, GEMMA_3_KEYS),
    "glm4": ("glm4", {}, {}),
    "granite": ("granite", {}, GRANITE_KEYS),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": ("olmo2", {}, {"attention.sliding_window": 24}),
    "phi3": ("phi3", {}, {"attention.sliding_window": 24}),
    "phi4_mini": ("phi3", {}, {}),
    "smollm3": ("smollm3", {}, {}),
}
"""By the small model: GGUF's architecture, changes of the model, keys beside those of all."""


def small(name: str) -> str:
    return "Q8_0"


def mixed(name: str) -> str:
    """Types like those of a file of Q4_K_M."""
    return "Q6_K" if name.startswith(("token_embd", "output")) or "attn_v" in name else "Q4_K"


def mixed_experts(name: str) -> str:
    return "Q6_K" if "ffn_down_exps" in name else mixed(name)


def make(
    folder: Path,
    family: str,
    kind_of: Callable[[str], str] = small,
    more_keys: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Path, PreTrainedModel]:
    """A folder that stands for a GGUF file of the family, and the model with its dequantised weights."""
    architecture, own, keys = CASES[family]
    made, out = folder / "made", folder / "out"
    model = make_checkpoint(made, family, **{**own, **changes})
    out.mkdir()
    reference = write_gguf(made / "small.gguf", model, architecture, kind_of, **{**keys, **(more_keys or {})})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (made / name).unlink()
    write_folder(made / "small.gguf", out)
    check_model_folder(out)
    return out, reference


@pytest.mark.parametrize("family", CASES)
def test_a_family(tmp_path: Path, family: str, tried: Callable[[str, str, str], None]) -> None:
    tried(family, "gguf", "Q8_0")
    folder, reference = make(tmp_path, family)
    assert_same_function(make_runner(folder), reference)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K", "mixed"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_type(tmp_path: Path, kind: str, tied: bool, tried: Callable[[str, str, str], None]) -> None:
    tried("llama3", "gguf", kind)
    folder, reference = make(
        tmp_path,
        "llama3",
        mixed if kind == "mixed" else lambda name: kind,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        tie_word_embeddings=tied,
    )
    assert_same_function(make_runner(folder), reference)


def test_experts_of_several_types_have_the_same_bits_in_chunks_and_steps(
    tmp_path: Path, tried: Callable[[str, str, str], None]
) -> None:
    tried("qwen3_moe", "gguf", "mixed")
    folder, reference = make(
        tmp_path,
        "qwen3_moe",
        mixed_experts,
        {"expert_feed_forward_length": 256},
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=2,
        head_dim=64,
    )
    runner = make_runner(folder, exact=True)
    assert_same_function(runner, reference)
    prompt = random_tokens(PROMPT_LEN, seed=7)
    assert torch.equal(all_logits(runner, prompt[:9]), all_logits(runner, prompt)[:9])


HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""The bytes of d and dmin."""


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_read_exactly(kind: str) -> None:
    rng, (numbers, size) = np.random.default_rng(0), BLOCKS[kind]
    blocks = rng.integers(0, 256, (70, 768 // numbers, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0, 2) if kind.endswith("_1") else (0,)):
        halves = rng.normal(0, 0.02, (*blocks.shape[:2], 1)).astype(np.float16)
        halves[0, 0] = 0
        blocks[..., at : at + 2] = halves.view(np.uint8)
    expected = gguf.quants.dequantize(blocks.reshape(70, -1), gguf.GGMLQuantizationType[kind])
    weight = weight_of_blocks(kind, torch.from_numpy(blocks.reshape(70, -1)))
    assert torch.equal(weight.dequantised(), torch.from_numpy(np.array(expected)))
    linear = native_cpu.NativeCpuKernels(1, native_cpu._cpu.instruction_sets()[0]).linear(weight, None)
    assert isinstance(linear, native_cpu.QuantisedLinear)
    padded = -(-70 // 32) * 32  # to panels
    assert sum(kept.nbytes for kept in linear._kept) == padded * 768 * packed_bytes(kind)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_mode_has_the_same_bits_in_chunks_and_steps_and_with_two_threads(
    tmp_path: Path, dtype: str
) -> None:
    folder, reference = make(
        tmp_path, "qwen3", mixed, hidden_size=256, intermediate_size=256, num_hidden_layers=2, head_dim=64
    )
    runner = make_runner(folder, dtype, exact=True)
    prompt = random_tokens(PROMPT_LEN, seed=7)
    whole = all_logits(runner, prompt)
    for index in (1, 9, 30):
        assert torch.equal(all_logits(runner, prompt[:index]), whole[:index])
    tokens = answer(runner, prompt, 64, seed=8, num_tokens=64)
    assert answer(runner, prompt, 7, seed=11, num_tokens=64) == tokens
    two = make_runner(folder, dtype, exact=True, threads=2)
    assert torch.equal(all_logits(two, prompt), whole)
    assert answer(two, prompt, 19, seed=13, num_tokens=64) == tokens
    if dtype == "float32":
        assert tokens == greedy_tokens(reference, prompt, tokens, 64)


def test_plain_weights_are_quantised_at_load(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "llama2", lambda name: "BF16")
    make_runner(folder, quantization="int8")


def test_the_dtype_is_that_of_other_bfloat16_checkpoints(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "llama2")
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.dtype == torch.bfloat16


def test_workers_of_another_type_exchange_no_cache(tmp_path: Path) -> None:
    folders = [make(tmp_path / kind, "llama2", lambda name, kind=kind: kind)[0] for kind in ("Q8_0", "Q4_0")]
    names = {content_names(folder).kv for folder in folders}
    again = make(tmp_path / "again", "llama2")[0]
    assert len(names) == 2
    assert content_names(again) == content_names(folders[0])


def test_ends_of_turns_end_a_text(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "llama2")
    config = check_model_folder(folder)
    assert config.bos_token_id == 256
    assert config.eos_token_ids == (257,)
    assert "assistant: " in (folder / "chat_template.jinja").read_text()


def test_files_beside_it_are_taken_in_place_of_its_metadata(tmp_path: Path) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    model = make_checkpoint(made, "llama2")
    out.mkdir()
    write_gguf(made / "a.gguf", model, "llama", small)
    write_folder(made / "a.gguf", out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (made / name).read_bytes()
    assert not (out / "chat_template.jinja").exists()
