"""Settings of a worker that can change its role."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field

from ..decode.settings import DecodeSettings
from ..prefill.settings import PrefillSettings
from ..transport.messages import Role


class FlexibleSettings(DecodeSettings, PrefillSettings):
    """Runs as a prefill or a decode worker, and changes from one to the other when told to: weights, KV blocks and prefix cache stay."""

    role: ClassVar[str] = "worker"

    start_as: Role = Field(default="decode", description="The role that it begins with.")
    max_num_seqs: int = Field(
        default=64,
        ge=1,
        le=65_536,
        description="Most sequences in its batch, and most prompts in a step.",
    )

    def in_role(self, role: str) -> Self:
        """Of the worker that this process is in that role: its name says which."""
        return self.model_copy(update={"name": f"{self.worker_id}:{role}"})
