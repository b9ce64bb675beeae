"""The tensors that a checkpoint must hold for a model, and those that it may hold beside them."""

from __future__ import annotations

from .config import ModelConfig
from .quantisation import BESIDE


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape."""
    wide = _wide_tensors(config)
    return wide if config.quantisation is None else config.quantisation.expected(wide)


def _wide_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    c, t = config, config.tensors
    expected: dict[str, tuple[int, ...]] = {
        f"{t.embed}.weight": (c.vocab_size, c.hidden_size),
        f"{t.norm}.weight": (c.hidden_size,),
    }
    if not c.tie_word_embeddings:
        expected[f"{t.head}.weight"] = (c.vocab_size, c.hidden_size)
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    projections = [
        (t.q, q_size if t.k else q_size + 2 * kv_size, c.hidden_size, c.qkv_bias),
        (t.k, kv_size, c.hidden_size, c.qkv_bias),
        (t.v, kv_size, c.hidden_size, c.qkv_bias),
        (t.o, c.hidden_size, q_size if c.latent is None else c.num_heads * c.latent.value, c.o_bias),
        (t.gate, c.intermediate_size if t.up else 2 * c.intermediate_size, c.hidden_size, c.mlp_bias),
        (t.up, c.intermediate_size, c.hidden_size, c.mlp_bias),
        (t.down, c.hidden_size, c.intermediate_size, c.mlp_bias),
    ]
    projections = [projection for projection in projections if projection[0]]
    outer = (t.input_norm, t.attention_out_norm, t.post_norm, t.mlp_out_norm)
    norms: list[tuple[str, tuple[int, ...]]] = [(name, (c.hidden_size,)) for name in outer if name]
    if c.qk_norm == "head":
        norms += [(t.q_norm, (c.head_dim,)), (t.k_norm, (c.head_dim,))]
    if c.qk_norm == "all":
        norms += [(t.q_norm, (q_size,)), (t.k_norm, (kv_size,))]
    if c.qk_norm == "each":
        norms += [(t.q_norm, (c.num_heads, c.head_dim)), (t.k_norm, (c.num_kv_heads, c.head_dim))]
    without_mlp = [projection for projection in projections if projection[0] not in (t.gate, t.up, t.down)]
    for index, layer in enumerate(map(t.layer.format, range(c.num_layers))):
        own = projections
        if c.latent is not None:
            expected |= c.latent.expected_tensors(layer)
        if c.mixture is not None and c.mixture.layers[index]:
            own = without_mlp
            expected |= c.mixture.expected_tensors(layer)
        if t.sinks:
            expected[f"{layer}.{t.sinks}"] = (c.num_heads,)
        expected |= {f"{layer}.{name}.weight": shape for name, shape in norms}
        expected |= {f"{layer}.{name}.weight": (rows, columns) for name, rows, columns, _ in own}
        expected |= {f"{layer}.{name}.bias": (rows,) for name, rows, _, bias in own if bias}
    return expected


def ignored_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Endings of names that a checkpoint may hold beside the expected ones; with a dot last: beginnings."""
    t = config.tensors
    further = range(config.num_layers, config.num_layers + config.further_layers)
    ignored = (*t.ignored, *(f"{t.layer.format(i)}." for i in further))
    ignored = (*ignored, *(f".{name.format(of)}" for name in t.kv_scales for of in "kv"))
    if config.quantisation is not None:
        ignored = (*ignored, *BESIDE)
    return (*ignored, f"{t.head}.weight") if config.tie_word_embeddings else ignored
