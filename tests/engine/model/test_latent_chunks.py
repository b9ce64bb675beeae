"""Latent attention over expanded keys and values is the function that the absorbed one is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from support.batches import HandSequence, hidden_states, make_batch
from support.engines import engine_config
from support.mixture_families import LATENT
from support.models import make_checkpoint
from support.quantised_models import make_runner, random_tokens

from splitserve.engine.model import latent_attention
from splitserve.engine.model.latent_chunks import expanding_saves
from splitserve.engine.model.latent_config import latent_config
from splitserve.engine.step.model_runner import ModelRunner


@pytest.mark.parametrize("family", ["deepseek2", "deepseek3"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "error"),
    [
        ("float32", "auto", 1e-5),
        ("float32", "int8", 0.02),
        ("float32", "fp8", 0.05),
        ("bfloat16", "auto", 0.15),
    ],
)
@pytest.mark.parametrize("block_size", [8, 16])  # of 16: the kernels hold keys in groups
def test_chunks_beside_decoding(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    dtype: str,
    kv_dtype: Literal["auto", "fp8", "int8"],
    error: float,
    block_size: int,
) -> None:
    """A first chunk, one over a context, a short one, and a decode step; heads in parts of 3 and 1."""
    monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", 3 * 2 * 12 * 8 * 40 * 4)
    make_checkpoint(tmp_path, family, qk_nope_head_dim=8, v_head_dim=32, kv_lora_rank=64)
    runner = ModelRunner(engine_config(tmp_path, "cpu", dtype, block_size, 96, kv_dtype=kv_dtype))
    lengths = ((0, 47), (12, 40), (20, 5), (30, 1))  # computed, of this step
    sequences = [
        HandSequence(random_tokens(sum(of), seed=i), list(range(i, 96, 4))) for i, of in enumerate(lengths)
    ]
    before = [(s, first) for s, (first, _) in zip(sequences, lengths, strict=True) if first]
    step = [(s, count) for s, (_, count) in zip(sequences, lengths, strict=True)]
    found = []
    for expands in (runner._model._expands, None):
        runner._model._expands = expands
        for s in sequences:
            s.num_computed = 0
        with torch.inference_mode():
            hidden_states(runner, make_batch(before, block_size))
            for s, first in before:
                s.num_computed = first
            found.append(hidden_states(runner, make_batch(step, block_size)))
    expanded, absorbed = (hidden.float() for hidden in found)
    assert (expanded - absorbed).norm() < error * absorbed.norm()
    assert not torch.equal(found[0], found[1])


def test_a_chunk_is_expanded_where_that_is_fewer_flops() -> None:
    config = latent_config(
        {
            **LATENT, "hidden_size": 7168, "num_attention_heads": 128, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        }
    )  # fmt: skip
    assert config.expanded == 192
    assert all(expanding_saves(config, length, length) for length in (2, 100, 4096))
    assert [expanding_saves(config, tokens, 1_000_000) for tokens in (1, 170, 171)] == [False, False, True]


def test_exact_mode_keeps_one_way(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek2", num_hidden_layers=1)
    assert make_runner(tmp_path)._model._expands is not None
    assert make_runner(tmp_path, exact=True)._model._expands is None
