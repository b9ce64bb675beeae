"""The families of the small checkpoints (``models.py``): each model's class, configuration and sizes."""

from __future__ import annotations

from .dense_families import DENSE
from .gemma_families import GEMMA_4
from .hybrid_families import HYBRID
from .latent_and_wrapped_families import LATENT_AND_WRAPPED
from .llama_like_families import LLAMA_LIKE
from .mixture_families import MIXTURES, Families

VOCAB_SIZE = 320  # 256 bytes, then special tokens and filling
EOS_TOKEN_ID = 257
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
FAMILIES: Families = DENSE | GEMMA_4 | LLAMA_LIKE | MIXTURES | LATENT_AND_WRAPPED
ALL_FAMILIES: Families = FAMILIES | HYBRID
"""Also those whose sequences have states beside their keys and values."""
