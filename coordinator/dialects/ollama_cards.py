"""Models as Ollama's lists describe them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from ..images.rules import NoImages
from ..text.served_model import ServedModel


def capabilities(model: ServedModel) -> list[str]:
    """Return what a model is good for, in Ollama's words."""
    rules, thinking = model.embeddings, ["thinking"] if model.chat_style.thinks else []
    vision = [] if isinstance(model.images, NoImages) else ["vision"]
    generates = [] if rules.alone else ["completion", "tools", *thinking, *vision]
    return [*generates, *([] if rules.refusal else ["embedding"])]


def card(model: ServedModel, name: str) -> dict[str, Any]:
    """Return a model as lists have it, under one of its names. The coordinator has no weights: the size is 0,
    and the digest is that of the first name, the context, the template and an adapter's content."""
    about = f"{model.name}\0{model.longest}\0{model.vocab_size}\0{model.template_source}"
    about += model.adapters().served.get(name, "")
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "size": 0,
        "digest": hashlib.sha256(about.encode()).hexdigest(),
        "details": details(model, name),
    }


def details(model: ServedModel, name: str) -> dict[str, Any]:
    """Return what is known of a model or, under its name, of an adapter."""
    family = model.architecture
    return {
        "parent_model": "" if name in model.names else model.name,
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }
