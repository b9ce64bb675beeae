"""The model families that are served: one entry each, by the architecture that config.json names.

Families share the decoder (``decoder.py``) and differ in the fields of ``Family`` only. To add one, add an
entry to ``dense_families.py`` or ``mixture_families.py``, and a small model of it to the comparison with
transformers (tests/support/families.py).
"""

from __future__ import annotations

from .dense_families import DENSE
from .mixture_families import MIXTURES

FAMILIES = dict(sorted((DENSE | MIXTURES).items()))
