"""Which models draft by a layer of their own (multi-token prediction; DeepSeek-V3, 2024, section 2.2). Free
of torch."""

from __future__ import annotations

from dataclasses import replace

from ..errors import ModelConfigError
from .config import ModelConfig
from .families import FAMILIES


def with_prediction(config: ModelConfig) -> ModelConfig:
    """Return the configuration with the first of its further layers to be loaded, with attention as of the
    last one. Raises ModelConfigError where the family or the checkpoint has no such layer."""
    names, mixture, quantisation = config.tensors.prediction, config.mixture, config.quantisation
    if quantisation is not None and not quantisation.schemes:
        raise ModelConfigError(
            "--mtp: of GGUF files the layer that predicts further tokens is not read: leave it out, or take "
            "the model's safetensors"
        )
    if names is None:
        served = ", ".join(name for name, family in FAMILIES.items() if family.tensors.prediction)
        raise ModelConfigError(
            f"--mtp: drafts by a layer of the model are not built for {config.architecture} (they are for "
            f"{served}): leave it out"
        )
    if not config.further_layers:
        raise ModelConfigError(
            "--mtp: config.json names no layer that predicts further tokens (num_nextn_predict_layers): "
            "leave it out"
        )
    names = names.of(names.layer or config.tensors.layer.format(config.num_layers))
    latent = config.latent
    if latent is not None and latent.index is not None:  # the layer has an index of its own
        latent = replace(latent, index=replace(latent.index, layers=(*latent.index.layers, True)))
    if mixture is not None:
        mixture = replace(mixture, layers=(*mixture.layers, mixture.layers[-1] and not names.dense))
    if quantisation is not None:  # published checkpoints keep both in bfloat16, whether they list them or not
        wide = (names.joined, *([names.head] if names.head else ()))
        quantisation = replace(quantisation, ignored=(*quantisation.ignored, *wide))
    return replace(
        config,
        predicts=True,
        tensors=replace(config.tensors, prediction=names, behind=(config.num_layers, names.layer)),
        latent=latent,
        mixture=mixture,
        quantisation=quantisation,
        sliding_windows=(*config.sliding_windows, config.sliding_windows[-1]),
        ropes=(*config.ropes, config.ropes[-1]),
    )
