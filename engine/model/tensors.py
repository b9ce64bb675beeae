"""The tensors that a checkpoint must hold for a model, and those that it may hold beside them."""

from __future__ import annotations

from .config import ModelConfig
from .quantisation import BESIDE
from .sparse_config import INDEXER


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape."""
    wide = _wide_tensors(config)
    if config.quantisation is None:
        return wide
    return config.quantisation.expected(wide, config.mixture is not None and config.mixture.names.stacked)


def _wide_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    c, t = config, config.tensors
    expected: dict[str, tuple[int, ...]] = {
        f"{t.embed}.weight": (c.vocab_size, c.hidden_size),
        f"{t.norm}.weight": (c.hidden_size,),
    }
    if not c.tie_word_embeddings:
        expected[f"{t.head}.weight"] = (c.vocab_size, c.hidden_size)
    mlp = [
        (t.gate, c.intermediate_size if t.up else 2 * c.intermediate_size, c.hidden_size, c.mlp_bias),
        (t.up, c.intermediate_size, c.hidden_size, c.mlp_bias),
        (t.down, c.hidden_size, c.intermediate_size, c.mlp_bias),
    ]
    for index in range(c.num_layers + c.predicts):
        layer, second, own = t.layer_name(index), t.mlp_name(index), c.tensors_of(index)
        projections, norms = _attention(c, index)
        if c.recurrent is not None and c.recurrent.layers[index]:
            projections.clear()
            norms.clear()
            expected |= c.recurrent.expected_tensors(layer, c.hidden_size)
        if c.latent is not None:
            expected |= c.latent.expected_tensors(layer)
            chosen = c.latent.index
            if chosen is not None and chosen.layers[index]:
                expected |= chosen.expected_tensors(layer, c.hidden_size, c.latent.query_rank)
        norms += [(name, (c.hidden_size,)) for name in (own.input_norm, own.attention_out_norm)]
        halves = [(layer, projections, norms)]
        if second:
            sparse = c.mixture if c.mixture is not None and c.mixture.layers[index] else None
            outer = [own.post_norm, own.mlp_out_norm, t.mixture_out_norm if sparse else ""]
            dense = mlp if sparse is None or sparse.names.beside else []
            halves.append((second, dense, [(name, (c.hidden_size,)) for name in outer]))
            expected |= sparse.expected_tensors(second) if sparse else {}
        if t.sinks:
            expected[f"{layer}.{t.sinks}"] = (c.num_heads,)
        if t.scalar:
            expected[f"{layer}.{t.scalar}"] = (1,)
        for of, linears, own_norms in halves:
            present = [linear for linear in linears if linear[0]]
            expected |= {f"{of}.{name}.weight": shape for name, shape in own_norms if name}
            expected |= {f"{of}.{name}.weight": (rows, columns) for name, rows, columns, _ in present}
            expected |= {f"{of}.{name}.bias": (rows,) for name, rows, _, bias in present if bias}
    return expected | _prediction(c)


def _prediction(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Those that the layer behind the last has beside a decoder layer's own."""
    names = c.tensors.prediction
    if not c.predicts or names is None:
        return {}
    norms = (names.token_norm, names.hidden_norm, names.norm)
    expected: dict[str, tuple[int, ...]] = {f"{norm}.weight": (c.hidden_size,) for norm in norms}
    return expected | {f"{names.joined}.weight": (c.hidden_size, 2 * c.hidden_size)}


def _attention(
    c: ModelConfig, layer: int
) -> tuple[list[tuple[str, int, int, bool]], list[tuple[str, tuple[int, ...]]]]:
    """Its projections (name, outputs, inputs, whether there is a bias) and the norms of heads."""
    t, heads = c.tensors, c.heads_of(layer)
    q_size, kv_size = c.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    q_rows = q_size * (1 + c.output_gate) if t.k else q_size + 2 * kv_size
    projections = [
        (t.q, q_rows, c.hidden_size, c.qkv_bias),
        (t.k, kv_size, c.hidden_size, c.qkv_bias),
        ("" if heads.keys_are_values else t.v, kv_size, c.hidden_size, c.qkv_bias),
        (t.o, c.hidden_size, q_size if c.latent is None else c.num_heads * c.latent.value, c.o_bias),
    ]
    of_heads: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "head": ((heads.head_dim,), (heads.head_dim,)),
        "all": ((q_size,), (kv_size,)),
        "each": ((c.num_heads, heads.head_dim), (heads.num_kv_heads, heads.head_dim)),
    }
    q, k = of_heads.get(c.qk_norm, ((), ()))
    return projections, [(t.q_norm, q), (t.k_norm, k)] if c.qk_norm else []


def ignored_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Endings of names that a checkpoint may hold beside the expected ones; with a dot last: beginnings."""
    t = config.tensors
    further = range(config.num_layers + config.predicts, config.num_layers + config.further_layers)
    ignored = (*t.ignored, *(f"{t.layer.format(i)}." for i in further))
    if config.index is not None:  # layers without an index of their own may hold one
        shared = (i for i, full in enumerate(config.index.layers) if not full)
        ignored += tuple(f"{t.layer_name(i)}.{INDEXER}." for i in shared)
    if config.predicts and t.prediction is not None:
        copies = (t.prediction.head, t.prediction.embed)
        ignored += tuple(f"{name}.weight" for name in copies if name)
    ignored = (*ignored, *(f".{name.format(of)}" for name in t.kv_scales for of in "kv"))
    if config.quantisation is not None:
        ignored = (*ignored, *BESIDE)
    return (*ignored, f"{t.head}.weight") if config.tie_word_embeddings else ignored
