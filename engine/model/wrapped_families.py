"""The families whose text model is a part of a model for text and images, by the architecture that
config.json names. Images are not served; their tensors are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .dense_families import DENSE
from .family import Family
from .latent_families import LATENT
from .mixture_config import MixtureNames
from .mixture_families import MIXTURES

TEXT_MODEL = "language_model.model"  # its name in most published checkpoints


def part_of(
    text: Family, name: str, head: str, ignored: tuple[str, ...], defaults: Mapping[str, Any] | None = None
) -> Family:
    """``text`` below ``text_config``. ``name``, ``head``: of its tensors."""
    names = replace(
        text.tensors,
        embed=f"{name}.embed_tokens", layer=f"{name}.layers.{{}}", norm=f"{name}.norm", head=head,
        ignored=(*text.tensors.ignored, *ignored),
    )  # fmt: skip
    return replace(text, part="text_config", tensors=names, defaults={**text.defaults, **(defaults or {})})


def _part_of_language_model(text: Family, projector: str) -> Family:
    ignored = ("vision_tower.", projector)
    return part_of(text, TEXT_MODEL, "language_model.lm_head", ignored, {"tie_word_embeddings": True})


def _mistral(text: Family) -> Family:
    return _part_of_language_model(text, "multi_modal_projector.")


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
MISTRAL = _mistral(DENSE["MistralForCausalLM"])
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
    "KimiK25ForConditionalGeneration": KIMI,
    "Kimi_K25ForConditionalGeneration": KIMI,
    "Mistral3ForConditionalGeneration": replace(
        MISTRAL,
        texts={
            "mistral": MISTRAL,
            "ministral3": _mistral(DENSE["Ministral3ForCausalLM"]),
            "mistral4": _mistral(LATENT["Mistral4ForCausalLM"]),
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": part_of(QWEN_2_5, "model", "lm_head", ("visual.",)),
    "Qwen3VLForConditionalGeneration": part_of(QWEN_3, "model.language_model", "lm_head", ("model.visual.",)),
    "Qwen3VLMoeForConditionalGeneration": part_of(
        replace(QWEN_3, mixture=QWEN_3_EXPERTS), "model.language_model", "lm_head", ("model.visual.",)
    ),
}
