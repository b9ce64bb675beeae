"""The model families that are served: one entry each, by the architecture that config.json names.

Families share the decoder (``decoder.py``) and differ in the fields of ``Family`` only. To add one, add an
entry to ``dense_families.py`` or the like, and a small model of it to the comparison with
transformers (tests/support/families.py).
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

from ..errors import ModelConfigError
from .dense_families import DENSE
from .hybrid_families import HYBRID
from .latent_families import LATENT
from .mixture_families import MIXTURES
from .wrapped_families import WRAPPED

FAMILIES = dict(sorted((DENSE | MIXTURES | LATENT | WRAPPED | HYBRID).items()))
MISSING_PARTS = {
    "linear_num_value_heads": "layers of linear attention",
    "mamba_d_state": "layers of recurrent state",
    "state_size": "layers of recurrent state",
    "is_encoder_decoder": "encoders",
    "vision_config": "images",
    "audio_config": "sounds",
}
"""By the key of config.json that asks for them."""


def architecture_of(config: dict[str, Any]) -> str:
    """Return the name of the family that a config.json asks for: a base model (``Qwen3Model``,
    ``Gemma3TextModel``) is of the same as the one with a head. Raises ModelConfigError."""
    architectures = config.get("architectures") or []
    if isinstance(architectures, list):
        architectures = [re.sub("^(.+?)(Text)?Model$", _with_head, str(each)) for each in architectures]
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or str(architectures[0]) not in FAMILIES
    ):
        found = ", ".join(map(str, architectures)) if isinstance(architectures, list) else ""
        missing = dict.fromkeys(part for key, part in MISSING_PARTS.items() if config.get(key))
        nearest = get_close_matches(found, FAMILIES, n=1, cutoff=0.0)
        raise ModelConfigError(
            f"config.json: architecture {found or 'none'} is not supported"
            + (f": {' and '.join(missing)} are not built" if missing else "")
            + (f"; nearest is {nearest[0]}" if found else "")
            + f" (supported: {', '.join(FAMILIES)})"
        )
    return str(architectures[0])


def _with_head(base: re.Match[str]) -> str:
    return head if (head := f"{base[1]}ForCausalLM") in FAMILIES else base[0]
