"""How a model family reads its config.json and names its checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import ModelConfigError
from .family_rules import Scales, Windows, full_attention, plain_scales
from .mixture_config import MixtureNames
from .recurrent_config import RecurrentConfig


@dataclass(frozen=True, slots=True)
class PredictionNames:
    """Names of the layer behind the last, which predicts further tokens (``prediction_layer.py``), and of
    its own tensors; {0}: the layer's name.

    layer  "": it has the next number among the model's layers
    head, embed  mostly copies of the model's own; "": there are none
    dense  it has no experts, also where the model's last layer has them
    """

    layer: str = ""
    token_norm: str = "{0}.enorm"
    hidden_norm: str = "{0}.hnorm"
    joined: str = "{0}.eh_proj"
    norm: str = "{0}.shared_head.norm"
    head: str = "{0}.shared_head.head"
    embed: str = "{0}.embed_tokens"
    dense: bool = False

    def of(self, layer: str) -> PredictionNames:
        """Whole names, of the layer of this name."""
        return replace(
            self,
            layer=layer,
            token_norm=self.token_norm.format(layer),
            hidden_norm=self.hidden_norm.format(layer),
            joined=self.joined.format(layer),
            norm=self.norm.format(layer),
            head=self.head.format(layer),
            embed=self.embed.format(layer),
        )


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names in the checkpoint, without ``.weight`` and ``.bias``. The layer's are within ``layer``.

    A norm named "" is not there. Where ``k`` and ``v`` are "", ``q`` holds all three, one after the other; so
    does ``gate`` where ``up`` is "". Where ``gate`` is "" there is none.
    """

    embed: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    input_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    attention_out_norm: str = ""
    post_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = ""
    mixture_out_norm: str = ""  # in place of the one above, in layers with experts
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    norm: str = "model.norm"
    head: str = "lm_head"
    scalar: str = ""  # the whole name; the residual behind a layer is multiplied by it
    sinks: str = ""  # the whole name; see ``AttentionInputs``
    kv_scales: tuple[str, str] = ("self_attn.{0}_scale", "self_attn.{0}_proj.{0}_scale")  # {0}: k or v
    halves: tuple[tuple[int, int], ...] = ()  # numbers of each layer's two, where they are apart; -1: none
    recurrent: TensorNames | None = None  # norms of recurrent layers, where they have other names
    prediction: PredictionNames | None = None
    behind: tuple[int, str] = (-1, "")  # number and name of the layer of ``prediction`` where it is loaded
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)  # endings, or beginnings that end with a dot
    later: TensorNames | None = None  # in checkpoints that transformers wrote since 4.52

    def layer_name(self, number: int) -> str:
        if self.halves:
            return self.layer.format(self.halves[number][0])
        return self.behind[1] if number == self.behind[0] else self.layer.format(number)

    def mlp_name(self, number: int) -> str:
        """The name of the layer with the second half of this one; "": it has none."""
        if not self.halves:
            return self.layer_name(number)
        place = self.halves[number][1]
        return "" if place < 0 else self.layer.format(place)


@dataclass(frozen=True, slots=True)
class Family:
    """A bias is there always (True), never (False), or where config.json sets the key that is named, or
    one of those.

    qk_norm           RMSNorm of each head, or of all heads of q and all of k together; or LayerNorm of each
                      head with a weight of its own, where config.json sets ``use_qk_norm``
    norm_after_rope   q and k are rotated before their norm
    unit_norms        norms multiply by 1 + weight
    values_normed     RMSNorm, without weights, of each head's value
    layer_norms       norms subtract the mean first
    parallel          attention and MLP have the same input, and both are added to the residual
    interleaved_rope  the numbers of a pair that is rotated lie side by side in the checkpoint
    windows_only_rope layers that attend to all tokens have no rope; a key as of biases
    defaults          of keys that config.json lacks
    terms             replaces the family's own keys of config.json by those of other families
    latent            attention is latent (DeepSeek)
    output_gate       attention's output is multiplied by the sigmoid of a gate; ``q`` makes it, too
    recurrent         layers with a state in place of keys and values; None: there are none
    halves            gives ``TensorNames.halves``; None: ()
    full_heads        layers that attend to all tokens have heads of their own: ``full_heads.py``
    mixture           names of the experts' tensors; None: all MLPs are dense
    part              the key of config.json below which the text model is described; "": it is the whole
    texts             by the ``model_type`` of that part, where it decides; empty: any is of this family
    """

    qkv_bias: bool | str | tuple[str, ...] = "attention_bias"
    o_bias: bool | str | tuple[str, ...] = False
    mlp_bias: bool | str | tuple[str, ...] = False
    qk_norm: Literal["", "head", "all", "each"] = ""
    norm_after_rope: bool = False
    unit_norms: bool = False
    values_normed: bool = False
    layer_norms: bool = False
    parallel: bool = False
    interleaved_rope: bool = False
    windows_only_rope: bool | str = False
    scales: Callable[[dict[str, Any], int], Scales] = plain_scales
    windows: Callable[[dict[str, Any], int], Windows] = full_attention
    tensors: TensorNames = TensorNames()
    latent: bool = False
    output_gate: bool = False
    recurrent: Callable[[dict[str, Any], int, int], RecurrentConfig | None] | None = None
    halves: Callable[[dict[str, Any]], tuple[tuple[int, int], ...]] | None = None
    full_heads: bool = False
    mixture: MixtureNames | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    terms: Callable[[dict[str, Any]], dict[str, Any]] = dict
    part: str = ""
    texts: Mapping[str, Family] = field(default_factory=dict)

    def of(self, config: dict[str, Any]) -> Family:
        """Return the family of the text model. Raises ModelConfigError where ``texts`` lacks its type."""
        if not self.texts:
            return self
        name = (config.get(self.part) or {}).get("model_type", next(iter(self.texts)))
        if name not in self.texts:
            raise ModelConfigError(
                f"config.json: a text model of type {name!r:.100} is not supported (supported: "
                f"{', '.join(self.texts)})"
            )
        return self.texts[name]

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return config.json of the text model, with the family's defaults. The head is tied where the whole
        or the part ties it: a head that is there all the same is found by ``LayerLoader.differ``."""
        whole, part = {**self.defaults, **config}, config.get(self.part) or {}
        tied = whole.get("tie_word_embeddings") or part.get("tie_word_embeddings")
        found = {**whole, **part, **({"tie_word_embeddings": bool(tied)} if part else {})}
        if found.get("rope_parameters") is None and "rope_parameters" in self.defaults:
            found["rope_parameters"] = self.defaults["rope_parameters"]
        return self.terms(found)
