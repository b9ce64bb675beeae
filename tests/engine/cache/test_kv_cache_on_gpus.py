"""How large a KV cache is on a GPU, and on several, by the memory that is free on a played one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import engine_config
from support.played_gpu import played_gpu

from splitserve.engine import loaded_model
from splitserve.engine.cache.kv_cache import KVCacheLayout
from splitserve.engine.cache.kv_cache_size import GIB, KVCacheSize
from splitserve.engine.cache.memory_claims import MemoryClaims
from splitserve.engine.errors import OutOfMemoryError
from splitserve.engine.model.block_spread import BlockSpread
from splitserve.engine.model.config import ModelConfig
from splitserve.engine.model.ranks import ALONE, Rank, spreads_blocks

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "eos_token_id": 128_001,
    "bos_token_id": 128_000,
    "hidden_act": "silu",
}
LATENT = {  # DeepSeek-V2-Lite's attention
    **LLAMA_8B,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "n_shared_experts": 1,
}
BLOCK_8B = 32 * 2 * 8 * 128 * 2 * 64  # bytes, of 64 tokens
WEIGHTS = 15 * GIB
CARD = 80 * GIB


def sized(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    card: int = CARD,
    others: int = 0,
    rank: Rank = ALONE,
    model: dict[str, Any] = LLAMA_8B,
    **options: Any,
) -> tuple[KVCacheSize, int]:
    """The KV cache of an 8B model that has just been loaded on a played card, where ``others`` take bytes
    too, and the card's free bytes then. The host is small."""
    (folder / "config.json").write_text(json.dumps(model))
    monkeypatch.setattr(loaded_model, "free_host_bytes", lambda: 2 * GIB)
    engine = engine_config(folder, device="cuda", max_decode_seqs=64, max_prefill_tokens=2048, **options)
    with played_gpu(monkeypatch) as gpu:
        gpu.total_bytes, gpu.reserved_bytes = card, WEIGHTS
        gpu.free_bytes, gpu.cached_bytes = card - WEIGHTS - others - GIB // 2, 4 * GIB
        loaded = loaded_model.LoadedModel.__new__(loaded_model.LoadedModel)
        loaded.config, loaded.device = ModelConfig.from_folder(folder), torch.device("cuda", 0)
        loaded.dtype, loaded._claims = torch.bfloat16, MemoryClaims("c", folder / "claims")
        loaded.layout = KVCacheLayout.of(loaded.config, 64, loaded.dtype)
        loaded.rank, loaded._engine, loaded._weight_bytes = rank, engine, 0
        loaded.own_heads = rank.kv_heads(loaded.config.num_kv_heads)
        if spreads_blocks(loaded.config, rank.size, engine.settings.exact):
            loaded.spread = BlockSpread(rank, 64)
        size = loaded.cache_size()
        held = size.num_blocks // (1 if loaded.spread is None else rank.size)
        assert held * loaded.own_layout.block_bytes < gpu.free_bytes
        return size, gpu.free_bytes


def test_a_cache_takes_nine_tenths_of_a_gpu_whatever_the_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, free = sized(tmp_path, monkeypatch)
    assert 0.84 * free < size.num_blocks * BLOCK_8B < 0.9 * free
    assert size.max_model_len == 131_072


@pytest.mark.parametrize("size", [2, 16])
def test_a_size_that_is_asked_for_is_of_all_gpus_together(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 16 each of the eight KV heads is on two."""
    found, _ = sized(tmp_path, monkeypatch, rank=Rank(1, size), kv_cache_gib=16)
    num_bytes = found.num_blocks * BLOCK_8B * max(1, 8 // size) // 8
    assert 0.99 * 16 * GIB / size < num_bytes <= 16 * GIB / size


@pytest.mark.parametrize("num_gpus", [2, 8])
def test_gpus_hold_as_many_times_the_tokens_of_latent_attention(
    num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exact mode each holds all. A step takes some memory for what comes from other GPUs."""
    one, free = sized(tmp_path, monkeypatch, model=LATENT)
    exact, _ = sized(tmp_path, monkeypatch, model=LATENT, rank=Rank(1, num_gpus), exact=True)
    spread, _ = sized(tmp_path, monkeypatch, model=LATENT, rank=Rank(1, num_gpus))
    assert one.num_blocks <= exact.num_blocks < 1.01 * one.num_blocks, "a step takes less memory"
    assert 0.97 * num_gpus * exact.num_blocks < spread.num_blocks < num_gpus * exact.num_blocks
    asked, _ = sized(tmp_path, monkeypatch, model=LATENT, rank=Rank(1, num_gpus), kv_cache_gib=16)
    block = 32 * 576 * 2 * 64
    assert asked.num_blocks == 16 * GIB // block, "of all GPUs together"
    assert free > 16 * GIB


def test_a_length_that_a_small_card_cannot_hold_is_lowered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, _ = sized(tmp_path, monkeypatch, card=24 * GIB)
    assert 16_384 < size.max_model_len == size.num_blocks * 64 < 131_072
    with pytest.raises(OutOfMemoryError, match="lower --max-model-len to"):
        sized(tmp_path, monkeypatch, card=24 * GIB, max_model_len=131_072)


def test_two_workers_on_one_card_have_a_cache_each_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``splitserve up`` starts them: each may take 0.45 of the card."""
    first, _ = sized(tmp_path, monkeypatch, gpu_memory_utilization=0.45)
    taken = WEIGHTS + GIB // 2 + first.num_blocks * BLOCK_8B
    second, _ = sized(tmp_path, monkeypatch, others=taken, gpu_memory_utilization=0.45)
    assert second == first
    assert 18 * GIB < first.num_blocks * BLOCK_8B < 21 * GIB
    late, _ = sized(tmp_path, monkeypatch, others=int(0.6 * CARD))  # started by hand, beside a worker
    assert GIB < late.num_blocks * BLOCK_8B < 17 * GIB, "what is left"
