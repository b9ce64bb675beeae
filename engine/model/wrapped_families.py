"""The families whose text model is a part of a model for text and images, by the architecture that
config.json names. Tensors for images are ignored here: engine/vision reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .dense_families import DENSE
from .family import Family, TensorNames
from .latent_families import LATENT
from .mixture_config import MixtureNames
from .mixture_families import MIXTURES

TEXT_MODEL = "language_model.model"  # its name in most published checkpoints


def part_of(
    text: Family, name: str, head: str, ignored: tuple[str, ...], defaults: Mapping[str, Any] | None = None
) -> Family:
    """``text`` below ``text_config``. ``name``, ``head``: of its tensors."""
    names = _named(text, name, head, ignored)
    return replace(text, part="text_config", tensors=names, defaults={**text.defaults, **(defaults or {})})


def _named(text: Family, name: str, head: str, ignored: tuple[str, ...]) -> TensorNames:
    return replace(
        text.tensors,
        embed=f"{name}.embed_tokens", layer=f"{name}.layers.{{}}", norm=f"{name}.norm", head=head,
        ignored=(*text.tensors.ignored, *ignored),
    )  # fmt: skip


def _part_of_language_model(text: Family, projector: str) -> Family:
    ignored = ("vision_tower.", projector)
    return part_of(text, TEXT_MODEL, "language_model.lm_head", ignored, {"tie_word_embeddings": True})


def _since_4_52(family: Family, text: Family, *ignored: str) -> Family:
    """``family`` with ``TensorNames.later``."""
    later = _named(text, "model.language_model", "lm_head", ignored)
    return replace(family, tensors=replace(family.tensors, later=later))


def _beside_a_projector(text: Family) -> Family:
    family = _part_of_language_model(text, "multi_modal_projector.")
    return _since_4_52(family, text, "model.vision_tower.", "model.multi_modal_projector.")


QWEN_2_5 = replace(
    DENSE["Qwen2ForCausalLM"],
    defaults={"sliding_window": 4096, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
)
QWEN_3 = Family(
    qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head",
    defaults={"head_dim": 128, "rope_theta": 5e5},
)  # fmt: skip
QWEN_3_EXPERTS = MixtureNames(
    "mlp.gate", "mlp.experts.gate_up_proj", "", "mlp.experts.down_proj", halves=True
)
KIMI = _part_of_language_model(MIXTURES["DeepseekV3ForCausalLM"], "mm_projector.")
GLM = part_of(
    DENSE["Glm4ForCausalLM"], "model.language_model", "lm_head", ("model.visual.",),
    {"head_dim": None, "rms_norm_eps": 1e-5},
)  # fmt: skip
GLM_EXPERTS = part_of(
    MIXTURES["Glm4MoeForCausalLM"], "model.language_model", "lm_head", ("model.visual.",),
    {"attention_bias": True},
)  # fmt: skip
GLM_EXPERTS = part_of(MIXTURES["Glm4MoeForCausalLM"], "model.language_model", "lm_head", ("model.visual.",))
GLM_EXPERTS = replace(GLM_EXPERTS, defaults={**GLM_EXPERTS.defaults, "attention_bias": True})
INTERNVL = {
    name: _beside_a_projector(text)
    for name, text in {
        "qwen2": DENSE["Qwen2ForCausalLM"],
        "qwen3": DENSE["Qwen3ForCausalLM"],
        "qwen3_moe": MIXTURES["Qwen3MoeForCausalLM"],
        "gpt_oss": MIXTURES["GptOssForCausalLM"],
    }.items()
}
MISTRAL = _beside_a_projector(DENSE["MistralForCausalLM"])
WRAPPED: dict[str, Family] = {
    "Exaone4_5_ForConditionalGeneration": part_of(
        DENSE["Exaone4ForCausalLM"], "model.language_model", "lm_head", ("model.visual.", "mtp.")
    ),
    "Gemma4ForConditionalGeneration": part_of(
        DENSE["Gemma4ForCausalLM"],
        "model.language_model",
        "lm_head",
        ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
    ),
    "Glm46VForConditionalGeneration": GLM,
    "Glm4vForConditionalGeneration": GLM,
    "Glm4vMoeForConditionalGeneration": GLM_EXPERTS,
    "InternVLForConditionalGeneration": replace(INTERNVL["qwen2"], texts=INTERNVL),
    "KimiK25ForConditionalGeneration": KIMI,
    "Kimi_K25ForConditionalGeneration": KIMI,
    "Mistral3ForConditionalGeneration": replace(
        MISTRAL,
        texts={
            "mistral": MISTRAL,
            "ministral3": _beside_a_projector(DENSE["Ministral3ForCausalLM"]),
            "mistral4": _beside_a_projector(LATENT["Mistral4ForCausalLM"]),
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": _since_4_52(
        part_of(QWEN_2_5, "model", "lm_head", ("visual.",)), QWEN_2_5, "model.visual."
    ),
    "Qwen3VLForConditionalGeneration": part_of(QWEN_3, "model.language_model", "lm_head", ("model.visual.",)),
    "Qwen3VLMoeForConditionalGeneration": part_of(
        replace(QWEN_3, mixture=QWEN_3_EXPERTS), "model.language_model", "lm_head", ("model.visual.",)
    ),
}
