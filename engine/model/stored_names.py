"""The names of tensors in a folder, where checkpoints of one family differ in them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..errors import WeightsError
from .family import TensorNames
from .mixture_config import MixtureConfig
from .weight_headers import stored_tensors


def names_as_stored(names: TensorNames, folder: Path) -> TensorNames:
    """Return ``names``, or those of later checkpoints where the folder's weights have these."""
    with suppress(WeightsError):  # ``check_model_folder`` raises it
        if names.later is not None and f"{names.later.embed}.weight" in stored_tensors(folder):
            return names.later
    return names


def as_stored(mixture: MixtureConfig | None, layer: str, folder: Path) -> MixtureConfig | None:
    """Return the mixture with the names that the folder's weights have, or as it is where there are none.
    ``layer``: see ``TensorNames``."""
    if mixture is None or mixture.names.apart is None or True not in mixture.layers:
        return mixture
    first = f"{layer.format(mixture.layers.index(True))}.{mixture.names.gate}"
    with suppress(WeightsError):  # ``check_model_folder`` raises it
        if first not in stored_tensors(folder):
            return replace(mixture, names=mixture.names.apart)
    return mixture
