"""A checkpoint of quantised weights that is split among ranks answers as the whole one does, or is refused
with what cannot be cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine.gguf.test_gguf_models import make as make_gguf
from engine.gguf.test_gguf_models import mixed
from engine.model.test_quantised_checkpoints import CASES, MIXTURES
from support.batches import HandSequence, make_batch
from support.engines import engine_config
from support.models import make_checkpoint
from support.quantised_checkpoints import rewrite, rewrite_experts_in_mxfp4
from support.quantised_models import BLOCK_SIZE, PROMPT_LEN, random_tokens, run

from splitserve.engine.errors import ModelConfigError
from splitserve.engine.step.model_runner import ModelRunner

SIZES = {"hidden_size": 128, "num_hidden_layers": 2}
EXPERT_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def assert_answers_alike(folder: Path, sizes: Sequence[int] = (2, 4), **settings: object) -> None:
    """In logprobs of a prompt, and greedily in chunks and steps."""
    prompt, found = random_tokens(PROMPT_LEN, seed=3), []
    for size in (1, *sizes):
        config = engine_config(
            folder, "cpu", "float32", BLOCK_SIZE, 24, tensor_parallel_size=size, **settings
        )
        runner, sequence = ModelRunner(config), HandSequence(prompt, list(range(8)))
        batch = make_batch([(sequence, PROMPT_LEN)], BLOCK_SIZE, prompt_logprobs=1)
        logprobs = [entry.logprob for entry in runner.execute(batch).prompt_logprobs[0]]
        sequence.blocks = list(range(9, 17))
        while sequence.num_computed < PROMPT_LEN:
            run(runner, sequence, min(17, PROMPT_LEN - sequence.num_computed))
        while len(sequence.output) < 9:
            run(runner, sequence, 1)
        found.append((sequence.output, logprobs))
    for tokens, logprobs in found[1:]:
        assert tokens == found[0][0]
        torch.testing.assert_close(logprobs, found[0][1], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_linears(tmp_path: Path, case: str, exact: bool) -> None:
    """Exact sums are not split, so that any order of inputs will do."""
    family = "glm4" if "AWQ" in case else "llama3"
    rewrite(tmp_path, make_checkpoint(tmp_path, family, intermediate_size=128, **SIZES), *CASES[case])
    if not exact and (CASES[case][0].get("desc_act") or "act-order" in case):
        with pytest.raises(ModelConfigError, match=r"size 2 does not fit .*o_proj: .*act-order"):
            assert_answers_alike(tmp_path)
    else:
        assert_answers_alike(tmp_path, exact=exact)


@pytest.mark.parametrize(("family", "case"), MIXTURES)
def test_experts(tmp_path: Path, family: str, case: str) -> None:
    heads = {
        "deepseek2": {"v_head_dim": 16},
        "deepseek3": {"v_head_dim": 16, "q_lora_rank": 48},
        "minimax_m2": {"head_dim": 32},
    }
    sizes = {**dict.fromkeys(EXPERT_SIZES, 128), **SIZES, **heads.get(family, {})}
    model = make_checkpoint(tmp_path, family, **sizes)
    rewrite(tmp_path, model, *CASES[case])
    if "act-order" in case:
        with pytest.raises(ModelConfigError, match=r"size 2 does not fit .*: .*act-order"):
            assert_answers_alike(tmp_path)
    else:
        assert_answers_alike(tmp_path)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    rewrite_experts_in_mxfp4(tmp_path, make_checkpoint(tmp_path, "gpt_oss", intermediate_size=128))
    assert_answers_alike(tmp_path)


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "mixed"])
@pytest.mark.parametrize("family", ["llama3", "phi3"])
def test_gguf(tmp_path: Path, kind: str, family: str) -> None:
    wide = {"hidden_size": 1024, "num_attention_heads": 8, "head_dim": 128, "intermediate_size": 1024}
    folder, _ = make_gguf(
        tmp_path, family, mixed if kind == "mixed" else lambda _: kind, num_hidden_layers=1, **wide
    )
    assert_answers_alike(folder)


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("family", ["llama3", "deepseek2", "gpt_oss", "gemma2"])
def test_caches_in_8_bits(tmp_path: Path, kv_dtype: str, family: str) -> None:
    make_checkpoint(tmp_path, family)
    assert_answers_alike(tmp_path, kv_dtype=kv_dtype)
