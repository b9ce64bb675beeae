"""Ranks with whole experts, not slices of each, answer as transformers does; and take over from slices."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from engine.gguf.test_gguf_models import make as make_gguf
from engine.gguf.test_gguf_models import mixed_experts
from engine.model.test_quantised_checkpoints import CASES
from engine.ranks.test_split_formats import assert_answers_alike
from engine.ranks.test_split_models import PROMPT_LEN, decoded, make_runner, moved, prefill, random_tokens
from support.greedy import greedy_tokens
from support.models import make_checkpoint
from support.quantised_checkpoints import rewrite, rewrite_experts_in_mxfp4

from splitserve.engine import loaded_model
from splitserve.engine.errors import ModelConfigError
from splitserve.engine.model.config import ModelConfig
from splitserve.engine.model.expert_split import split_experts
from splitserve.engine.model.weight_sizes import uneven_bytes
from splitserve.engine.model.weights import Checkpoint

NUM_TOKENS = 16
LAYOUTS = (
    "mixtral", "gpt_oss", "qwen2_moe", "deepseek3", "gemma4_moe", "granite_moe_shared", "ernie4_5_moe",
    "qwen3_vl_moe", "minimax_m2",
)  # fmt: skip


@pytest.mark.parametrize("family", LAYOUTS)
def test_slices_hand_over_to_whole_experts(family: str, tmp_path: Path) -> None:
    """To 2 ranks, and to 4: of 6 experts these have 2, 2, 1 and 1."""
    reference, prompt = make_checkpoint(tmp_path, family), random_tokens(PROMPT_LEN, seed=5)
    slices = make_runner(tmp_path, 2)
    here = prefill(slices, prompt, 40, first_block=2)
    for size in (2, 4):
        whole = make_runner(tmp_path, size, expert_parallel=True)
        found = decoded(whole, moved(slices, whole, here))
        assert found == greedy_tokens(reference, prompt, found, NUM_TOKENS)
        assert found == decoded(whole, prefill(whole, prompt, 30, first_block=2))
        assert len(set(found)) > 3, "an answer that repeats itself shows little"


@pytest.mark.parametrize(
    ("family", "columns", "size"), [("gpt_oss", 192, 4), ("qwen3_moe", 96, 2), ("deepseek3", 96, 2)]
)
def test_slices_that_do_not_fit(
    family: str, columns: int, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MXFP4 as of gpt-oss-120b on 4 GPUs, float8 in blocks as of Qwen3-235B-A22B on 8: of blocks of 32, 48
    columns would be no whole number. Of a shared expert like that, rank 0 has all."""
    if family == "gpt_oss":
        reference = rewrite_experts_in_mxfp4(
            tmp_path, make_checkpoint(tmp_path, family, intermediate_size=columns)
        )
    else:
        own = {"moe_intermediate_size": columns, "intermediate_size": 128, "hidden_size": 128}
        latent = {"v_head_dim": 16, "q_lora_rank": 64, "n_shared_experts": 1} if family == "deepseek3" else {}
        model = make_checkpoint(tmp_path, family, **own, **latent)
        reference = rewrite(tmp_path, model, *CASES["FP8 in blocks"])
    prompt = random_tokens(PROMPT_LEN, seed=5)
    with caplog.at_level(logging.INFO):
        runner = make_runner(tmp_path, size)
    assert f"{columns} columns of an expert do not fit {size} ranks: each has whole experts" in caplog.text
    assert ("rank 0 alone computes it" in caplog.text) == (family == "deepseek3")
    found = decoded(runner, prefill(runner, prompt, 30, first_block=2))
    assert found == greedy_tokens(reference, prompt, found, NUM_TOKENS)


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("qwen2_moe", "compressed-tensors int8 weights"),
        ("mixtral", "AWQ"),
        ("qwen3_moe", "GPTQ in act-order"),
    ],
)
def test_formats(family: str, case: str, tmp_path: Path) -> None:
    """An order of inputs that cannot be cut is refused with the way out; exact, as no other sum is split."""
    sizes = {"intermediate_size": 128} if family == "mixtral" else {"moe_intermediate_size": 64}
    rewrite(tmp_path, make_checkpoint(tmp_path, family, hidden_size=128, **sizes), *CASES[case])
    exact = "act-order" in case
    if exact:
        refusal = r"experts\.0\.down_proj: .*act-order.*; set --expert-parallel"
        with pytest.raises(ModelConfigError, match=refusal):
            assert_answers_alike(tmp_path, exact=exact)
    assert_answers_alike(tmp_path, exact=exact, expert_parallel=True)


def test_gguf(tmp_path: Path) -> None:
    """Super-blocks have 256 columns, and so have experts."""
    keys, heads = {"expert_feed_forward_length": 256}, {"num_attention_heads": 8, "head_dim": 128}
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1}
    folder, _ = make_gguf(tmp_path, "qwen3_moe", mixed_experts, keys, **sizes, **heads)
    assert_answers_alike(folder)


def test_exact_workers_share_how_experts_are_split(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral")
    prompt, runner = (
        random_tokens(PROMPT_LEN, seed=8),
        make_runner(tmp_path, 2, "bfloat16", exact=True, expert_parallel=True),
    )
    whole = prefill(runner, prompt, 80, 0)
    blocks = runner.kv_cache.block_bytes_view[whole.blocks[:4]].copy()
    chunked = prefill(runner, prompt, 7, 16)
    np.testing.assert_array_equal(runner.kv_cache.block_bytes_view[chunked.blocks[:4]], blocks)
    assert runner.loaded.numerics.endswith("whole experts with --tensor-parallel-size 2")


def test_ranks_read_and_keep_their_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read once; packed ones are kept under other names than slices."""
    make_checkpoint(tmp_path, "qwen3_moe")
    tensor, read = Checkpoint.tensor, list[str]()
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name: (read.append(name), tensor(self, name))[1])
    parts = list[str]()
    monkeypatch.setattr(loaded_model, "kept_files", lambda *_, part: parts.append(part) or ())
    make_runner(tmp_path, 4, expert_parallel=True)
    downs = [name for name in read if "layers.1." in name and name.endswith("down_proj.weight")]
    assert downs == [f"model.layers.1.mlp.experts.{i}.down_proj.weight" for i in range(8)]
    make_runner(tmp_path, 2)
    assert parts == [*(f"{i}-of-4-whole-experts" for i in range(4)), "0-of-2", "1-of-2"]


def test_more_ranks_than_experts(tmp_path: Path) -> None:
    """Each has a slice of all four, but no whole one."""
    reference, prompt = make_checkpoint(tmp_path, "mixtral", num_attention_heads=8), random_tokens(40, seed=5)
    runner = make_runner(tmp_path, 8)
    found = decoded(runner, prefill(runner, prompt, 30, first_block=2))
    assert found == greedy_tokens(reference, prompt, found, NUM_TOKENS)
    refusal = r"size 8: each rank needs a whole one of 4 experts \(possible: 2, 4\)"
    with pytest.raises(ModelConfigError, match=refusal):
        make_runner(tmp_path, 8, expert_parallel=True)
    make_checkpoint(tmp_path / "odd", "mixtral", num_attention_heads=8, intermediate_size=162)
    with pytest.raises(ModelConfigError, match=refusal):
        make_runner(tmp_path / "odd", 8)


def test_a_model_without_experts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama2")
    with pytest.raises(ModelConfigError, match="--expert-parallel: the model has no experts"):
        make_runner(tmp_path, 1, expert_parallel=True)


@pytest.mark.parametrize(("family", "shared"), [("qwen2_moe", False), ("deepseek3", True)])
def test_the_bytes_that_rank_0_has_more(family: str, shared: bool, tmp_path: Path) -> None:
    """Of 6 experts on 4 ranks it has 2; of 8 an even part, but all of a shared one that cannot be cut."""
    sizes = {"moe_intermediate_size": 30, "n_shared_experts": 1} if shared else {}
    make_checkpoint(tmp_path, family, **sizes)
    config = split_experts(ModelConfig.from_folder(tmp_path), 4, whole=True)
    assert config.mixture is not None
    shape = config.mixture.shape
    expert = sum(config.mixture.layers) * 3 * shape.hidden_size * shape.intermediate_size * 2
    assert uneven_bytes(config, 2, 4) == (0.75 if shared else 2 - 6 / 4) * expert
