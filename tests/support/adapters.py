"""Seeded adapters of small models, saved by ``peft``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel


def save_adapter(
    model: PreTrainedModel, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> PeftModel:
    """Write the folder, and return the model with the adapter in it; ``model`` is changed. By default every
    linear layer gets one of rank 4 that changes what it gives by about as much as it gives."""
    wrapped = _wrapped(model, "default", config)
    _draw(wrapped, "default", seed, dtype)
    wrapped.save_pretrained(str(folder))
    return wrapped.eval()


def save_adapters(model: PreTrainedModel, folder: Path, seeds: dict[str, int], **config: Any) -> PeftModel:
    """Write a folder in ``folder`` for each name of ``seeds``, as ``save_adapter`` does.

    Return the model with all of them; ``set_adapter`` switches to one."""
    wrapped = model
    for name, seed in seeds.items():
        wrapped = _wrapped(wrapped, name, config)
        _draw(wrapped, name, seed, torch.float32)
    wrapped.save_pretrained(str(folder))
    return wrapped.eval()


def _wrapped(model: PreTrainedModel | PeftModel, name: str, config: dict[str, Any]) -> PeftModel:
    wanted = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **config})
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # what transformers renames
        if not isinstance(model, PeftModel):
            return get_peft_model(model, wanted, adapter_name=name)
        model.add_adapter(name, wanted)
        return model


def _draw(wrapped: PeftModel, adapter: str, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for name, tensor in wrapped.named_parameters():
            if ".lora_" in name and adapter in name.split("."):
                scale = tensor.shape[-1] ** -0.5
                tensor.copy_((torch.randn(tensor.shape, generator=generator) * scale).to(dtype))
                tensor.data = tensor.data.to(dtype)
