"""The prefill worker's settings."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ..engine.settings import WorkerSettings
from ..transport.handoff.layer_slicing import SlicingMode

DEFAULT_BATCH_TOKENS = {"cpu": 512, "cuda": 2048}


class PrefillSettings(WorkerSettings):
    """Computes prompts in chunks and hands their KV blocks to decode workers."""

    role: ClassVar[str] = "prefill"

    max_batch_tokens: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="Most prompt tokens computed in one step: the chunk budget. 0: 512 on CPUs, 2048 on GPUs, where a step's kernels are "
        "launched one by one, which takes a small model longer than to compute 512 tokens (an estimate: not yet measured on a GPU).",
    )
    kv_slicing: SlicingMode = Field(
        default="auto",
        description="How KV blocks leave while a chunk is computed. layers: each layer as soon as it is written; blocks: whole, when "
        "the chunk is done; auto: a few layers at a time, by the chunk's size and the measured rate of the mover.",
    )
    max_num_seqs: int = Field(default=64, ge=1, le=65_536, description="Most prompts in one step.")

    def chunk_budget(self, device_type: str) -> int:
        """``max_batch_tokens``, or what suits a ``cpu`` or a ``cuda`` device."""
        return self.max_batch_tokens or DEFAULT_BATCH_TOKENS[device_type]
