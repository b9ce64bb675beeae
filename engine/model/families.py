"""The model families that are served: one entry each, by the architecture that config.json names.

Families share the decoder (``decoder.py``) and differ in the fields of ``Family`` only. To add one, add an
entry to ``dense_families.py`` or the like, and a small model of it to the comparison with
transformers (tests/support/families.py).
"""

from __future__ import annotations

from .dense_families import DENSE
from .latent_families import LATENT
from .mixture_families import MIXTURES
from .wrapped_families import WRAPPED

FAMILIES = dict(sorted((DENSE | MIXTURES | LATENT | WRAPPED).items()))
