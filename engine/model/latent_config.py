"""Multi-head latent attention, as config.json gives it (DeepSeek-V2, 2024). Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .config_values import positive_int
from .sparse_config import IndexConfig, index_config

ATTENTION = "self_attn"


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of a token's vectors. All heads share one latent vector and one rotated key. Each head makes its
    own key and value of the latent vector.

    query_rank  of the vector that queries are made of; 0: of the hidden state itself
    rank        of the latent vector
    plain, rotated  of a head's query and key: the parts without and with rope
    value       of a head's value
    index       None: a token attends to all before it
    """

    num_heads: int
    hidden_size: int
    query_rank: int
    rank: int
    plain: int
    rotated: int
    value: int
    bias: bool
    index: IndexConfig | None = None

    @property
    def cached(self) -> int:
        """Numbers of a token's latent vector and rotated key, in each layer of the KV cache."""
        return self.rotated + self.rank

    @property
    def expanded(self) -> int:
        """Numbers of a head's key, and of its value, where both are made for each token."""
        return -(-max(self.plain + self.rotated, self.value) // 8) * 8

    def expected_tensors(self, layer: str) -> dict[str, tuple[int, ...]]:
        """The tensors of this layer's attention, with their shapes; without the output projection's."""
        queries, hidden = self.num_heads * (self.plain + self.rotated), self.hidden_size
        expected: dict[str, tuple[int, ...]] = {
            "kv_a_proj_with_mqa.weight": (self.rank + self.rotated, hidden),
            "kv_a_layernorm.weight": (self.rank,),
            "kv_b_proj.weight": (self.num_heads * (self.plain + self.value), self.rank),
        }
        if self.query_rank:
            expected |= {
                "q_a_proj.weight": (self.query_rank, hidden),
                "q_a_layernorm.weight": (self.query_rank,),
                "q_b_proj.weight": (queries, self.query_rank),
            }
        else:
            expected["q_proj.weight"] = (queries, hidden)
        if self.bias:
            expected["kv_a_proj_with_mqa.bias"] = (self.rank + self.rotated,)
        if self.bias and self.query_rank:
            expected["q_a_proj.bias"] = (self.query_rank,)
        return {f"{layer}.{ATTENTION}.{name}": shape for name, shape in expected.items()}


def latent_config(config: dict[str, Any]) -> LatentConfig:
    """Raises ModelConfigError where a number is missing or not sensible."""
    return LatentConfig(
        num_heads=positive_int(config, "num_attention_heads"),
        hidden_size=positive_int(config, "hidden_size"),
        query_rank=positive_int(config, "q_lora_rank") if config.get("q_lora_rank") else 0,
        rank=positive_int(config, "kv_lora_rank"),
        plain=positive_int(config, "qk_nope_head_dim"),
        rotated=positive_int(config, "qk_rope_head_dim"),
        value=positive_int(config, "v_head_dim"),
        bias=bool(config.get("attention_bias", False)),
        index=index_config(config),
    )


def without_share(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json without ``partial_rotary_factor``, which ``rotated`` gives in numbers."""
    share = "partial_rotary_factor"
    return {
        key: {inner: of for inner, of in value.items() if inner != share}
        if isinstance(value, dict)
        else value
        for key, value in config.items()
        if key != share
    }
