"""The model's configuration, from config.json and generation_config.json of a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ...kernels.mixture_shape import Activation
from ..errors import ModelConfigError
from .config_values import activation_of, check_kinds, positive_int, read_json
from .families import FAMILIES, architecture_of
from .family import Family, TensorNames
from .family_rules import Scales
from .full_heads import FullHeads, full_heads
from .latent_config import LatentConfig, latent_config, without_share
from .mixture_config import MixtureConfig, mixture_config
from .quantisation import Quantisation, parse_quantisation
from .recurrent_config import RecurrentConfig, StateLayout, cache_layer
from .rope_config import RopeConfig, rope_configs, rope_max_model_len
from .sparse_config import WEIGHTS, IndexConfig
from .stored_names import as_stored, names_as_stored

MODELOPT = "hf_quant_config.json"
SENTENCE_TRANSFORMERS = "modules.json"  # its checkpoints are of the model without its head


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder; families (``families.py``) differ in these fields only."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    output_gate: bool
    qk_norm: Literal["", "head", "all", "each"]
    norm_after_rope: bool
    unit_norms: bool
    values_normed: bool
    layer_norms: bool
    parallel: bool
    activation: Activation
    latent: LatentConfig | None  # attention's keys and values; None: of heads
    mixture: MixtureConfig | None  # of experts; None: all MLPs are dense
    scales: Scales
    attention_softcap: float  # x becomes softcap tanh(x / softcap); 0: it stays
    logits_softcap: float
    sliding_windows: tuple[int | None, ...]  # by layer, in tokens; None: full attention
    ropes: tuple[RopeConfig, ...]  # by layer
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tensors: TensorNames
    quantisation: Quantisation | None = None  # of the checkpoint's weights
    side_by_side: bool = False  # see ``rope.rows_side_by_side``
    full_heads: FullHeads | None = None  # of layers without a window, where they differ
    recurrent: RecurrentConfig | None = None  # layers with a state in place of keys and values
    further_layers: int = 0  # behind the last: they predict further tokens
    predicts: bool = False  # the first of them is used: see ``prediction_config.py``

    @property
    def max_model_len(self) -> int:
        """Longest sequence (prompt and output) that the model is good for."""
        return min(rope_max_model_len(rope, self.max_position_embeddings) for rope in self.ropes)

    def for_length(self, max_model_len: int) -> ModelConfig:
        """Return the configuration for sequences of up to this length."""
        return replace(self, ropes=tuple(rope.for_length(max_model_len) for rope in self.ropes))

    @property
    def window(self) -> int:
        """Tokens that a token attends to at most, in any layer; 0: some layer attends to all."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.sliding_windows) else 0

    @property
    def residual_eps(self) -> float:
        """The norms' eps where the residual is kept divided by f, ``Scales.residual``: rms_norm(x / f) with
        eps / f^2 is rms_norm(x) with eps."""
        return self.rms_norm_eps / self.scales.residual**2

    def heads_of(self, layer: int) -> FullHeads:
        """Key-value heads of this layer."""
        if self.full_heads is not None and self.sliding_windows[layer] is None:
            return self.full_heads
        return FullHeads(self.num_kv_heads, self.head_dim, keys_are_values=False)

    def cache_layer(self, layer: int) -> int:
        """The layer of the KV cache that has this layer's keys and values, or its state."""
        return layer if self.recurrent is None else cache_layer(self.recurrent, layer)

    @property
    def num_cache_layers(self) -> int:
        return self.cache_layer(self.num_layers - 1) + 1 + self.predicts

    def tensors_of(self, layer: int) -> TensorNames:
        recurrent = self.recurrent is not None and self.recurrent.layers[layer]
        return self.tensors.recurrent or self.tensors if recurrent else self.tensors

    @property
    def spreads_states(self) -> bool:
        """See ``StateLayout.is_spread``."""
        return self.states is not None and self.states.is_spread

    @property
    def states(self) -> StateLayout | None:
        """Places of recurrent layers' states in the KV cache."""
        of = self.recurrent
        return None if of is None else StateLayout(of, self.num_kv_heads, self.head_dim)

    @property
    def index(self) -> IndexConfig | None:
        """The index of sparse attention; None: attention is not sparse."""
        return None if self.latent is None else self.latent.index

    @property
    def cached_row(self) -> int:
        """Numbers of a token and key-value head in a plane of the KV cache."""
        return self.head_dim + (0 if self.index is None else self.index.head_dim)

    @property
    def kv_planes(self) -> int:
        """Keys and values of a token, or one vector that is both."""
        return 2 if self.latent is None else 1

    @property
    def mlp_width(self) -> int:
        """A token's numbers in an MLP, over three: gate, up and their product, and for the experts' parts of
        the sum, too."""
        if self.mixture is None:
            return self.intermediate_size
        shape = self.mixture.shape
        sparse = shape.num_chosen * (shape.intermediate_size + shape.hidden_size) + shape.shared_size
        return max(self.intermediate_size, sparse)

    @classmethod
    def from_folder(cls, path: Path) -> ModelConfig:
        """Raises ModelConfigError where the folder, its architecture or one of its features cannot be
        served."""
        if not path.is_dir():
            raise ModelConfigError(
                f"{path} is not a folder; give the folder of a Hugging Face checkpoint (with config.json)"
            )
        config = read_json(path / "config.json")
        others = (path / name for name in ("generation_config.json", MODELOPT))
        generation, modelopt = (read_json(file) if file.exists() else {} for file in others)
        try:
            found = parse_config(config, generation, modelopt)
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise ModelConfigError(
                f"{path / 'config.json'} has a value of the wrong type ({error!r:.200}); download it again"
            ) from error
        found = replace(found, tensors=names_as_stored(found.tensors, path))
        found = replace(found, mixture=as_stored(found.mixture, found.tensors.layer, path))
        if found.architecture not in config["architectures"] or (path / SENTENCE_TRANSFORMERS).exists():
            # it has no head of its own, or none that is used: only embeddings are served, unless it is tied
            found = replace(found, tie_word_embeddings=True)
        return found


def parse_config(
    config: dict[str, Any], generation: dict[str, Any], modelopt: dict[str, Any] | None = None
) -> ModelConfig:
    """``modelopt``: its hf_quant_config.json."""
    architecture = architecture_of(config)
    check_kinds(config)
    family = FAMILIES[architecture].of(config)
    config = family.config(config)
    quantisation = parse_quantisation(config.get("quantization_config") or {}, modelopt or {})
    activation = activation_of(config, gated=bool(family.tensors.gate))
    both_ways = config.get("use_bidirectional_attention") not in (None, False, "vision")
    if both_ways or config.get("is_causal") is False:
        raise ModelConfigError("config.json: attention to later tokens (of embedding models) is not built")
    if config.get("hidden_size_per_layer_input") or config.get("num_kv_shared_layers"):
        raise ModelConfigError(
            "config.json: embeddings of each layer (hidden_size_per_layer_input) and layers that share keys "
            "and values (num_kv_shared_layers), as in Gemma's E2B and E4B, are not built"
        )
    if config.get("clip_qkv"):
        raise ModelConfigError(
            "config.json: queries, keys and values that are clipped (clip_qkv) are not built"
        )
    num_heads = positive_int(config, "num_attention_heads")
    num_kv_heads = positive_int(config, "num_key_value_heads", num_heads)
    hidden_size = positive_int(config, "hidden_size")
    head_dim = positive_int(config, "head_dim", family.defaults.get("head_dim") or hidden_size // num_heads)
    num_layers = positive_int(config, "num_hidden_layers")
    latent = latent_config(config) if family.latent else None
    if latent is not None:
        head_dim, num_kv_heads = latent.cached, 1
    if num_heads % num_kv_heads:
        raise ModelConfigError(
            f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly"
        )
    if head_dim % 8:
        raise ModelConfigError(
            f"config.json: head_dim {head_dim} is not supported; it must be a multiple of 8"
        )

    windows = family.windows(config, num_layers)
    if latent is not None and any(windows):
        raise ModelConfigError("config.json: latent attention with windows (layer_types) is not built")
    own = full_heads(config, windows, num_kv_heads, head_dim) if family.full_heads else None
    names = None if config.get("enable_moe_block") is False else family.mixture
    mixture = None if names is None else mixture_config(config, names, num_layers, activation)
    if quantisation is not None and names is not None:  # these never are, whatever is left out by name
        wide = (names.router, names.shared_gate or names.router, WEIGHTS)
        quantisation = replace(quantisation, ignored=(*quantisation.ignored, *wide))

    def has(bias: bool | str | tuple[str, ...]) -> bool:
        if isinstance(bias, bool):
            return bias
        return any(bool(config.get(key, False)) for key in ((bias,) if isinstance(bias, str) else bias))

    interleaved = bool(config.get("rope_interleave", family.interleaved_rope))
    return ModelConfig(
        architecture=architecture,
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive_int(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", config.get("layer_norm_eps", 1e-6))),
        max_position_embeddings=positive_int(config, "max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=has(family.qkv_bias),
        o_bias=has(family.o_bias),
        mlp_bias=has(family.mlp_bias),
        output_gate=family.output_gate,
        qk_norm=family.qk_norm if config.get("use_qk_norm", True) else "",
        norm_after_rope=family.norm_after_rope,
        unit_norms=bool(config.get("unit_norms", family.unit_norms)),
        values_normed=family.values_normed,
        layer_norms=family.layer_norms,
        parallel=family.parallel,
        activation=activation,
        latent=latent,
        mixture=mixture,
        ropes=rope_configs(
            config if latent is None else without_share(config),
            head_dim if latent is None else latent.rotated,
            windows,
            interleaved,
            has(family.windows_only_rope),
            family.norm_after_rope,
            None if own is None else own.head_dim,
        ),
        scales=family.scales(config, head_dim),
        attention_softcap=float(config.get("attn_logit_softcapping") or 0),
        logits_softcap=float(config.get("final_logit_softcapping") or 0),
        sliding_windows=windows,
        eos_token_ids=_eos_token_ids(config, generation),
        bos_token_id=config.get("bos_token_id"),
        tensors=_tensors(config, family),
        quantisation=quantisation,
        side_by_side=interleaved and not family.interleaved_rope,
        full_heads=own,
        recurrent=family.recurrent(config, num_layers, num_kv_heads) if family.recurrent else None,
        further_layers=_further_layers(config, family),
    )


def _tensors(config: dict[str, Any], family: Family) -> TensorNames:
    if family.halves is not None:
        return replace(family.tensors, halves=family.halves(config))
    without = config.get("use_post_norm") is False  # of HyperCLOVA X
    return replace(family.tensors, attention_out_norm="", mlp_out_norm="") if without else family.tensors


def _further_layers(config: dict[str, Any], family: Family) -> int:
    """Most checkpoints of DeepSeek's layout have one, whatever their config.json names."""
    keys = [key for key in ("num_nextn_predict_layers", "num_mtp_modules") if config.get(key)]
    return positive_int(config, keys[0]) if keys else int(family.latent)


def _eos_token_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json decides where it speaks; both may give one id or several."""
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)
