"""Clusters that answer as slowly as a test needs, on any machine: no weights, steps of a given length."""

from __future__ import annotations

from pathlib import Path

from splitserve.cli.settings import DEMO_MODEL
from splitserve.engine.latency_profile import Memory, Piece, Profile, StepModel

MODEL = DEMO_MODEL
"""The model with the tokenizer that is used."""
MAX_MODEL_LEN = 2048


def paced_runner(path: Path, prefill_step_s: float, decode_step_s: float) -> str:
    """The value of ``--runner`` for such steps; its profile is written to ``path``."""
    prefill, decode = (
        StepModel(pieces=(Piece(curve=((0, seconds),)),)) for seconds in (prefill_step_s, decode_step_s)
    )
    memory = Memory(
        block_size=16, num_blocks=512, block_bytes=1 << 12, num_layers=8, max_model_len=MAX_MODEL_LEN
    )
    Profile(name="slow", memory=memory, prefill=prefill, decode=decode).write(path)
    return f"paced:{path}"
