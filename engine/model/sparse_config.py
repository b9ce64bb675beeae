"""DeepSeek's sparse attention (DeepSeek-V3.2-Exp, 2025), as config.json gives it. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ModelConfigError
from .config_values import positive_int

INDEXER = "self_attn.indexer"
WEIGHTS = f"{INDEXER}.weights_proj"  # of heads: never quantised, whatever is left out by name
FULL, SHARED = "full", "shared"


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """The index of a layer: each token has a key, and chooses by ``num_heads`` queries of ``head_dim``
    numbers the ``chosen`` tokens that it attends to.

    layers       which have one; the others attend to the tokens that the layer before them does (GLM-5.2)
    interleaved  numbers of a pair that is rotated lie side by side in the checkpoint
    """

    num_heads: int
    head_dim: int
    chosen: int
    layers: tuple[bool, ...]
    interleaved: bool

    def expected_tensors(self, layer: str, hidden_size: int, query_rank: int) -> dict[str, tuple[int, ...]]:
        """The tensors of this layer's index, with their shapes."""
        names = f"{INDEXER}.wq_b", f"{INDEXER}.wk", WEIGHTS
        matrices = zip(names, self.matrices(hidden_size, query_rank), strict=True)
        expected: dict[str, tuple[int, ...]] = {f"{layer}.{name}.weight": shape for name, shape in matrices}
        return expected | {f"{layer}.{INDEXER}.k_norm.{of}": (self.head_dim,) for of in ("weight", "bias")}

    def matrices(self, hidden_size: int, query_rank: int) -> list[tuple[int, int]]:
        """Shapes: of queries, keys and the weights of heads."""
        queries = self.num_heads * self.head_dim
        return [(queries, query_rank), (self.head_dim, hidden_size), (self.num_heads, hidden_size)]


def index_config(config: dict[str, Any]) -> IndexConfig | None:
    """None: attention is not sparse. Raises ModelConfigError where a value is missing or not sensible."""
    if not config.get("index_topk"):
        return None
    positive_int(config, "q_lora_rank")  # queries are made of the same vector
    head_dim = positive_int(config, "index_head_dim")
    if head_dim % 8 or head_dim < positive_int(config, "qk_rope_head_dim"):
        raise ModelConfigError(
            f"config.json: index_head_dim {head_dim} is not supported; it must be a multiple of 8, and no "
            "less than qk_rope_head_dim"
        )
    num_layers = positive_int(config, "num_hidden_layers")
    kinds = [FULL if kind == "F" else SHARED if kind == "S" else kind for kind in _kinds(config, num_layers)]
    if len(kinds) < num_layers or not {*kinds} <= {FULL, SHARED} or kinds[0] != FULL:
        raise ModelConfigError(
            f"config.json: indexer_types (or index_topk_pattern) must name {num_layers} layers, each "
            f"{FULL} or {SHARED}, the first one {FULL}"
        )
    return IndexConfig(
        num_heads=positive_int(config, "index_n_heads"),
        head_dim=head_dim,
        chosen=positive_int(config, "index_topk"),
        layers=tuple(kind == FULL for kind in kinds[:num_layers]),
        interleaved=bool(config.get("indexer_rope_interleave", False)),
    )


def _kinds(config: dict[str, Any], num_layers: int) -> list[str]:
    """Return each layer's, from a pattern, or one full layer in each ``index_topk_freq``."""
    given = config.get("indexer_types") or config.get("index_topk_pattern")
    if isinstance(given, str | list):
        return list(given)
    every = positive_int(config, "index_topk_freq", 1)
    offset = config.get("index_skip_topk_offset", 2)
    if given or type(offset) is not int:
        raise ModelConfigError(
            "config.json: indexer_types (or index_topk_pattern) must be a list or a word, and "
            f"index_skip_topk_offset a whole number, found {given!r:.100} and {offset!r:.100}"
        )
    return [FULL if max(i - offset + 1, 0) % every == 0 else SHARED for i in range(num_layers)]
