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
    wanted = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **config}
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # what transformers renames
        wrapped = get_peft_model(model, LoraConfig(**wanted))
    generator = torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for name, tensor in wrapped.named_parameters():
            if ".lora_" in name:
                scale = tensor.shape[-1] ** -0.5
                tensor.copy_((torch.randn(tensor.shape, generator=generator) * scale).to(dtype))
                tensor.data = tensor.data.to(dtype)
    wrapped.save_pretrained(str(folder))
    return wrapped.eval()
