"""Settings of a worker that can change its role."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field

from ..decode.settings import DecodeSettings
from ..prefill.settings import PrefillSettings
from .role_host import worker_name


class FlexibleSettings(DecodeSettings, PrefillSettings):
    """Runs as a prefill or a decode worker, and changes from one to the other when told to: weights, KV blocks and prefix cache stay. Or it
    is both, and stays so."""

    role: ClassVar[str] = "worker"

    start_as: Literal["prefill", "decode", "mixed"] = Field(
        default="decode",
        description="The role that it begins with. mixed: it is of both for good, and generates for the prompts that it computes, of which "
        "next to nothing moves.",
    )
    max_num_seqs: int = Field(
        default=64,
        ge=1,
        le=65_536,
        description="Most sequences in its batch, and most prompts in a step.",
    )

    def in_role(self, role: str) -> Self:
        """Of the worker that this process is in that role: its name says which."""
        return self.model_copy(update={"name": worker_name(self.worker_id, role)})
