"""Models by name: the numbers of their ``config.json`` that a step's time depends on."""

from __future__ import annotations

from typing import Any

_LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN3 = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}
_QWEN3_MOE = {**_QWEN3, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
_DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280, "max_position_embeddings": 163840,
}  # fmt: skip


def _numbers(layers: int, hidden: int, heads: int, **others: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, **others}


MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _numbers(32, 4096, 32, intermediate_size=14336, **_LLAMA),
    "llama-3.1-70b": _numbers(80, 8192, 64, intermediate_size=28672, **_LLAMA),
    "qwen3-32b": _numbers(64, 5120, 64, num_key_value_heads=8, intermediate_size=25600, **_QWEN3),
    "qwen3-30b-a3b": _numbers(48, 2048, 32, moe_intermediate_size=768, **_QWEN3_MOE),
    "qwen3-235b-a22b": _numbers(94, 4096, 64, moe_intermediate_size=1536, **_QWEN3_MOE),
    "gpt-oss-120b": _numbers(
        36, 2880, 64, num_key_value_heads=8, head_dim=64, intermediate_size=2880, num_local_experts=128,
        num_experts_per_tok=4, vocab_size=201088, max_position_embeddings=131072,
        layer_types=["sliding_attention", "full_attention"] * 18,
        quantization_config={"quant_method": "mxfp4"},
    ),
    "minimax-m2.5": _numbers(
        62, 3072, 48, num_key_value_heads=8, head_dim=128, intermediate_size=1536, num_local_experts=256,
        num_experts_per_tok=8, vocab_size=200064, max_position_embeddings=196608,
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": {
        **_DEEPSEEK_V3, "num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1,
        "vocab_size": 163840, "max_position_embeddings": 262144,
    },
}  # fmt: skip
