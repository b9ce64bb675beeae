"""The model families that are served: one entry each, by the architecture that config.json names.

An entry describes how its config.json is read and how its checkpoint names the tensors. Families share the
decoder (``decoder.py``) and differ in these fields only. To add one, add an entry, and a small model of it to
the comparison with transformers in tests/engine/model/test_transformers_parity.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .family_rules import (
    Scales,
    Windows,
    cohere_scales,
    deepseek_scales,
    full_attention,
    gemma_scales,
    granite_scales,
    plain_scales,
    same_window,
    window_if_used,
    windows_by_layer,
    windows_by_pattern,
)
from .mixture_config import MixtureNames


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names in the checkpoint, without ``.weight`` and ``.bias``. The layer's are within ``layer``.

    A norm named "" is not there. Where ``k`` and ``v`` are "", ``q`` holds all three, one after the other; so
    does ``gate`` where ``up`` is "".
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
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    norm: str = "model.norm"
    head: str = "lm_head"
    sinks: str = ""  # the whole name; see ``AttentionInputs``
    kv_scales: tuple[str, str] = ("self_attn.{0}_scale", "self_attn.{0}_proj.{0}_scale")  # {0}: k or v
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)  # endings, or beginnings that end with a dot


@dataclass(frozen=True, slots=True)
class Family:
    """A bias is there always (True), never (False), or where config.json sets the key that is named.

    qk_norm           RMSNorm of each head, or of all heads of q and all of k together; or LayerNorm of each
                      head with a weight of its own, where config.json sets ``use_qk_norm``
    unit_norms        norms multiply by 1 + weight
    layer_norms       norms subtract the mean first
    parallel          attention and MLP have the same input, and both are added to the residual
    interleaved_rope  the numbers of a pair that is rotated lie side by side in the checkpoint
    windows_only_rope layers that attend to all tokens have no rope
    defaults          of keys that config.json lacks
    latent            attention is latent (DeepSeek)
    mixture           names of the experts' tensors; None: all MLPs are dense
    part              the key of config.json below which the text model is described; "": it is the whole
    """

    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: Literal["", "head", "all", "each"] = ""
    unit_norms: bool = False
    layer_norms: bool = False
    parallel: bool = False
    interleaved_rope: bool = False
    windows_only_rope: bool = False
    scales: Callable[[dict[str, Any], int], Scales] = plain_scales
    windows: Callable[[dict[str, Any], int], Windows] = full_attention
    tensors: TensorNames = TensorNames()
    latent: bool = False
    mixture: MixtureNames | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""

    def config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return config.json of the text model, with the family's defaults."""
        return {**self.defaults, **config, **(config.get(self.part) or {})}


COHERE = Family(
    o_bias="attention_bias", layer_norms=True, parallel=True, interleaved_rope=True, scales=cohere_scales,
    tensors=TensorNames(post_norm=""), qk_norm="each",
    defaults={
        "tie_word_embeddings": True, "logit_scale": 0.0625, "layer_norm_eps": 1e-5, "use_qk_norm": False,
        "rope_theta": 5e5,
    },
)  # fmt: skip
QWEN_MIXTURE = MixtureNames(
    "mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"
)
DEEPSEEK_2 = Family(
    o_bias="attention_bias", latent=True, interleaved_rope=True, scales=deepseek_scales,
    tensors=TensorNames(q="", k="", v=""),
    mixture=replace(
        QWEN_MIXTURE, correction="mlp.gate.e_score_correction_bias",
        shared=(
            "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"
        ),
    ),
    defaults={"norm_topk_prob": False, "topk_method": "greedy", "scoring_func": "softmax"},
)  # fmt: skip
DEEPSEEK_3 = replace(
    DEEPSEEK_2,
    defaults={
        "norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 8,
        "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
    },
)  # fmt: skip
GEMMA_2 = Family(
    o_bias="attention_bias", unit_norms=True, scales=gemma_scales, windows=windows_by_pattern,
    tensors=TensorNames(
        attention_out_norm="post_attention_layernorm", post_norm="pre_feedforward_layernorm",
        mlp_out_norm="post_feedforward_layernorm",
    ),
    defaults={
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "vocab_size": 256000,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
        "max_position_embeddings": 8192, "sliding_window": 4096, "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
)  # fmt: skip
GEMMA_3 = replace(
    GEMMA_2,
    qk_norm="head",
    defaults={
        **GEMMA_2.defaults, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "sliding_window_pattern": 6, "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
)  # fmt: skip
GEMMA_3_IN_PARTS = replace(
    GEMMA_3,
    part="text_config",
    tensors=replace(
        GEMMA_3.tensors,
        embed="language_model.model.embed_tokens", layer="language_model.model.layers.{}",
        norm="language_model.model.norm", head="language_model.lm_head",
        ignored=("vision_tower.", "multi_modal_projector."),
    ),
)  # fmt: skip
OLMO_2 = Family(
    o_bias="attention_bias", qk_norm="all",
    tensors=TensorNames(
        input_norm="", attention_out_norm="post_attention_layernorm", post_norm="",
        mlp_out_norm="post_feedforward_layernorm",
    ),
    defaults={"rms_norm_eps": 1e-5},
)  # fmt: skip
OLMO_3 = replace(
    OLMO_2,
    windows=windows_by_pattern,
    defaults={
        **OLMO_2.defaults, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 5e5,
        "rope_local_base_freq": 5e5,
    },
)  # fmt: skip
QWEN_MIXTURE_SHARED = replace(
    QWEN_MIXTURE,
    shared=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    shared_gate="mlp.shared_expert_gate",
)
FAMILIES = {
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": replace(
        COHERE, windows=windows_by_pattern, windows_only_rope=True,
        defaults={
            **COHERE.defaults, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 1e4,
        },
    ),
    "DeepseekV2ForCausalLM": DEEPSEEK_2,
    "DeepseekV3ForCausalLM": DEEPSEEK_3,
    "Gemma2ForCausalLM": GEMMA_2,
    "Gemma3ForCausalLM": GEMMA_3,
    "Gemma3ForConditionalGeneration": GEMMA_3_IN_PARTS,
    "Glm4ForCausalLM": Family(
        interleaved_rope=True,
        defaults={
            "head_dim": 128, "num_key_value_heads": 2, "attention_bias": True, "rms_norm_eps": 1.5625e-07,
            "partial_rotary_factor": 0.5,
        },
        tensors=TensorNames(
            attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm",
            gate="mlp.gate_up_proj", up="",
        ),
    ),
    "GptOssForCausalLM": Family(
        o_bias="attention_bias", windows=windows_by_pattern, tensors=TensorNames(sinks="self_attn.sinks"),
        mixture=MixtureNames("mlp.router", "mlp.experts.gate_up_proj", "", "mlp.experts.down_proj"),
        defaults={
            "attention_bias": True, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2,
            "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rope_theta": 150000.0, "rms_norm_eps": 1e-5,
        },
    ),
    "GraniteForCausalLM": Family(o_bias="attention_bias", mlp_bias="mlp_bias", scales=granite_scales),
    "LlamaForCausalLM": Family(o_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(windows=same_window, defaults={"sliding_window": 4096}),
    "MixtralForCausalLM": Family(
        windows=same_window, defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5},
        mixture=MixtureNames(
            "block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3",
            "block_sparse_moe.experts.{}.w2",
        ),
    ),
    "Olmo2ForCausalLM": OLMO_2,
    "Olmo3ForCausalLM": OLMO_3,
    "Phi3ForCausalLM": Family(
        qkv_bias=False, windows=same_window, defaults={"rms_norm_eps": 1e-5},
        tensors=TensorNames(q="self_attn.qkv_proj", k="", v="", gate="mlp.gate_up_proj", up=""),
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows=windows_by_layer, defaults={"sliding_window": 4096}),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias="qkv_bias", windows=windows_by_layer, mixture=QWEN_MIXTURE_SHARED,
        defaults={"norm_topk_prob": False, "qkv_bias": True, "sliding_window": 4096},
    ),
    "Qwen3ForCausalLM": Family(
        o_bias="attention_bias", qk_norm="head", windows=windows_by_layer,
        defaults={"head_dim": 128, "sliding_window": 4096},
    ),
    "Qwen3MoeForCausalLM": Family(
        o_bias="attention_bias", qk_norm="head", windows=window_if_used, mixture=QWEN_MIXTURE,
        defaults={"norm_topk_prob": False, "sliding_window": 4096},
    ),
    "SmolLM3ForCausalLM": Family(
        o_bias="attention_bias", mlp_bias="mlp_bias", windows=windows_by_layer,
        defaults={"tie_word_embeddings": True, "no_rope_layer_interval": 4, "rope_theta": 2e6},
    ),
}  # fmt: skip
