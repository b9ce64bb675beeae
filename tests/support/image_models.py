"""What a coordinator reads of tiny checkpoints that take images, and images to send."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from .families import ALL_FAMILIES, SMALL
from .http_fakes import byte_level_tokenizer
from .models import make_decisive, name_as_published

MARKS = [
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *("<|media_begin|>", "<|media_pad|>", "<|media_end|>", "<img>", "<IMG_CONTEXT>", "</img>"),
    *("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
]
QWEN = "<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>"
PIXTRAL = "[IMG]", "[IMG]"
KIMI = "<|media_begin|>image<|media_pad|><|media_end|>", "<|media_pad|>"
INTERNVL = "<IMG_CONTEXT>\n", "<IMG_CONTEXT>"
INTERNVLS = "internvl", "internvl_qwen3", "internvl_qwen3_moe", "internvl_gpt_oss"
GLM = "<|begin_of_image|><|image|><|end_of_image|>", "<|image|>"
GLMS = "glm4v", "glm46v", "glm4v_moe"
MISTRALS = "mistral3", "mistral3_ministral", "mistral3_mistral4"
FORMS = {
    **dict.fromkeys(GLMS, GLM),
    "kimi_k25": KIMI,
    **dict.fromkeys(INTERNVLS, INTERNVL),
    **dict.fromkeys(MISTRALS, PIXTRAL),
}
"""What the template writes for an image, and the token of it that stands for the image; else QWEN."""
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QWEN_3 = {
    "patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 32 * 32 * 40}
}  # fmt: skip
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "kimi_k25": {
        "media_proc_cfg": {
            "in_patch_limit": 80,
            "patch_size": 14,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "merge_kernel_size": 2,
            "fixed_output_tokens": None,
            "patch_limit_on_one_side": 11,
        }
    },
    "qwen2_5_vl": {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 28 * 28 * 40},
    "qwen3_vl": QWEN_3,
    "qwen3_vl_moe": QWEN_3,
    "qwen3_5_images": QWEN_3,
    **{key: {"size": {"shortest_edge": 6272, "longest_edge": 2 * 28 * 28 * 40}} for key in GLMS},
    **{key: {"size": {"height": 56, "width": 56}, "max_patches": 6} for key in INTERNVLS},
    **{key: {"size": {"longest_edge": 154}} for key in MISTRALS},
}
VISION: dict[str, dict[str, Any]] = {
    "kimi_k25": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {"patch_size": 16},
    "qwen3_vl_moe": {"patch_size": 16},
    "qwen3_5_images": {"patch_size": 16},
    **{key: {} for key in (*GLMS, *INTERNVLS)},
    **{key: {"image_size": 168} for key in MISTRALS},
}


def write_image_model(folder: Path, family: str) -> None:
    """Write a folder without weights: the family's configuration, a tokenizer with its marks, a template."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    mark, token = FORMS.get(family, QWEN)
    names = {"eos_token": "<|eos|>", "chat_template": TEMPLATE.replace("MARK", mark)}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    _, config_class, own = ALL_FAMILIES[family]
    config = config_class(**{**SMALL, **own, "vocab_size": 512, "max_position_embeddings": 2048}).to_dict()
    config["image_token_id"] = tokenizer.token_to_id(token)
    config.pop("image_token_index", None)
    config["vision_config"] |= VISION[family]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[family]))


def make_image_model(folder: Path, family: str) -> Any:
    """Write the folder with weights, too. Return the transformers model."""
    write_image_model(folder, family)
    model_class: Any = ALL_FAMILIES[family][0]
    torch.manual_seed(0)
    model = model_class(model_class.config_class.from_pretrained(folder))
    make_decisive(model, 0)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("visual", "vision", "mm_projector")):
            parameter.data *= 4  # else an image changes no token
    model.eval().save_pretrained(folder)
    name_as_published(folder, family)
    return model


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Return an image of noise over a gradient."""
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 128, (height, width, channels)) + np.linspace(0, 127, width).astype(int)[:, None]
    values = values.astype(np.uint8)
    return Image.fromarray(values[:, :, 0] if channels == 1 else values, mode)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """Return a file of an image."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def in_base64(file: bytes) -> str:
    return base64.b64encode(file).decode()


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{in_base64(file)}"


CHAT, RESPONSES, CLAUDE, LLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
WIDE, TALL = encoded(picture(70, 100)), encoded(picture(160, 64, seed=1))
PAD = "<|image_pad|>"


def part(file: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file), **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def of(*parts: Any, role: str = "user") -> dict[str, Any]:
    """Return a message of parts."""
    return {"role": role, "content": [*parts]}


def source(file: bytes) -> dict[str, Any]:
    return {"type": "base64", "media_type": "image/png", "data": in_base64(file)}
