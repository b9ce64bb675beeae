"""Sparse attention of DeepSeek-V3.2 and GLM-5: what published checkpoints have, exact mode, and refusals.
``test_transformers_parity`` holds it against transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.batches import HandSequence, make_batch
from support.families import FAMILIES, SMALL
from support.latent_and_wrapped_families import SPARSE
from support.models import make_checkpoint
from support.quantised_checkpoints import SIDES, by_block, rewrite
from support.quantised_models import (
    BLOCK_SIZE,
    PROMPT_LEN,
    answer,
    assert_exact,
    assert_same_function,
    make_runner,
    random_tokens,
)

from splitserve.engine.engine_config import check_formats
from splitserve.engine.errors import ModelConfigError
from splitserve.engine.model.config import parse_config
from splitserve.engine.model.model_folder import check_model_folder
from splitserve.engine.model.sparse_attention import sparse_step
from splitserve.engine.model.sparse_config import index_config
from splitserve.engine.settings import WorkerSettings
from splitserve.kernels import native_index
from splitserve.kernels.interface import AttentionInputs

INDEX = {
    "num_hidden_layers": 6, "q_lora_rank": 40, "qk_rope_head_dim": 16, "index_topk": 24, "index_head_dim": 24,
    "index_n_heads": 16,
}  # fmt: skip
both = pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])


def layers(**fields: Any) -> str:
    config = index_config({**INDEX, **fields})
    assert config is not None
    return "".join("F" if full else "S" for full in config.layers)


def test_layers_share_what_one_of_them_chooses() -> None:
    assert layers() == "FFFFFF"
    assert layers(index_topk_freq=4, index_skip_topk_offset=3) == "FFFSSS"
    assert layers(index_topk_freq=2) == "FFSFSF"
    assert layers(index_topk_pattern="FSSFSF", index_topk_freq=4) == "FSSFSF"
    assert layers(indexer_types=["full", "shared", "full", "full", "shared", "full", "full"]) == "FSFFSF"


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"index_topk_pattern": "SFFFFF"}, "the first one full"),
        ({"index_topk_pattern": 7}, "must be a list or a word"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": math.inf}, "a whole number, found None and inf"),
        ({"indexer_types": ["full"] * 5}, "must name 6 layers"),
        ({"indexer_types": ["full"] * 5 + ["half"]}, "full or shared"),
        ({"index_head_dim": 12}, "multiple of 8"),
        ({"index_head_dim": 8}, "no less than qk_rope_head_dim"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"index_n_heads": 0}, "index_n_heads"),
    ],
)
def test_what_is_not_sensible_is_refused(fields: dict[str, Any], found: str) -> None:
    with pytest.raises(ModelConfigError, match=found):
        index_config({**INDEX, **fields})


def test_tokens_that_see_many_are_told_from_the_others() -> None:
    """A chunk that ends beyond, one within, a decode step beyond and one that sees exactly as many."""
    lengths, counts = [10, 6, 20, 8], [5, 6, 1, 1]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    tables = torch.arange(4, dtype=torch.int32)[:, None]
    inputs = AttentionInputs(starts, torch.tensor(lengths, dtype=torch.int32), tables, 1.0)
    step = sparse_step(inputs, 8)
    assert step is not None
    assert step.rows.tolist() == [3, 4, 11]
    assert step.others.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 10, 12]
    assert step.scored.seq_lens.tolist() == [10, 20]
    assert step.scored.query_start_loc.tolist() == [0, 2, 3]
    assert step.dense.seq_lens.tolist() == [8, 6, 8]
    assert step.dense.query_start_loc.tolist() == [0, 3, 9, 10]
    assert step.dense.block_tables.flatten().tolist() == [0, 1, 3]
    assert sparse_step(inputs, 20) is None


@both
def test_only_tokens_that_see_many_are_scored(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, family)
    runner, scored, choose = make_runner(tmp_path), list[int](), native_index.index_slots

    def count(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        scored.append(len(q))
        return choose(q, *rest)

    monkeypatch.setattr(type(runner.loaded.kernels), "index_slots", staticmethod(count))
    sequence = HandSequence(random_tokens(31, seed=1), list(range(6)))
    for tokens, expected in ((20, []), (4, []), (6, [6]), (1, [1])):
        runner.execute(make_batch([(sequence, tokens)], BLOCK_SIZE))
        sequence.num_computed += tokens
        assert scored == expected * (2 if family == "glm_moe_dsa" else 3)
        scored.clear()


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_mode(family: str, dtype: str, tmp_path: Path) -> None:
    """Among equal scores, too: of an index with one head, many are 0."""
    make_checkpoint(tmp_path, family, index_n_heads=1)
    assert_exact(tmp_path, dtype)


@both
def test_a_checkpoint_in_float8_with_a_further_layer(
    family: str, tmp_path: Path, tried: Callable[[str, str, str], None]
) -> None:
    """Blocks share scales, weights of the index's heads are wide, whatever is listed."""
    tried(family, "checkpoint", "FP8 in blocks")
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 64, "v_head_dim": 16}
    model = make_checkpoint(tmp_path, family, q_lora_rank=48, index_head_dim=32, **sizes)
    config = {"quant_method": "fp8", "weight_block_size": list(SIDES), "activation_scheme": "dynamic"}
    reference = rewrite(tmp_path, model, config, by_block)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert "model.layers.0.self_attn.indexer.wk.weight_scale_inv" in tensors
    further = {"model.layers.3.self_attn.indexer.wk.weight": torch.ones(3, 5)}
    save_file({**tensors, **further}, path, metadata={"format": "pt"})
    check_model_folder(tmp_path)
    whole = make_runner(tmp_path)
    assert_same_function(whole, reference)
    prompt = random_tokens(PROMPT_LEN, seed=4)
    split = make_runner(tmp_path, tensor_parallel_size=2)
    assert answer(split, prompt, 17, seed=5) == answer(whole, prompt, 17, seed=5)


@both
def test_what_it_is_not_built_for_is_refused(family: str, tmp_path: Path) -> None:
    model_class, _, own = FAMILIES[family]
    config = parse_config({**SMALL, **own, "architectures": [model_class.__name__]}, {})
    settings = WorkerSettings(model=tmp_path, insecure=True, dtype="bfloat16")
    check_formats(settings, config, torch.device("cpu"))
    with pytest.raises(ModelConfigError, match="kernels on CPUs only, and the device is cuda"):
        check_formats(settings, config, torch.device("cuda"))
    for kv_dtype in ("int8", "fp8"):
        with pytest.raises(ModelConfigError, match="no KV cache in float8 or int8: leave out --kv-dtype"):
            check_formats(settings.model_copy(update={"kv_dtype": kv_dtype}), config, torch.device("cpu"))


def test_it_is_read_from_a_config_of_deepseek_3_too() -> None:
    """Other software does so, too: index_topk decides."""
    model_class, _, own = FAMILIES["deepseek3"]
    config = {**SMALL, **own, **SPARSE, "architectures": [model_class.__name__]}
    assert parse_config(config, {}).cached_row == 16 + 32 + 24
