"""The decode worker's settings."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ..engine.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """Generates tokens in a continuous batch, from KV blocks that prefill workers put into its cache."""

    role: ClassVar[str] = "decode"

    max_num_seqs: int = Field(default=64, ge=1, le=65_536, description="Most sequences in the batch.")
    listen: str = Field(
        default="tcp://127.0.0.1:*",
        pattern=r"^tcp://([^\s:]+|\[[0-9a-fA-F:.]+\]):(\d+|\*)$",
        description="Where prefill workers reach this worker: it listens here. tcp://HOST:PORT; port * lets the system choose.",
    )
    data_listen: str = Field(
        default="tcp://127.0.0.1:*",
        pattern=r"^tcp://([^\s:]+|\[[0-9a-fA-F:.]+\]):(\d+|\*)$",
        description="Where KV blocks arrive with the zmq mover. tcp://HOST:PORT; port * lets the system choose.",
    )
    advertise_host: str = Field(
        default="",
        max_length=255,
        description="Host name or address that prefill workers connect to. Default: the one in listen; where that is 0.0.0.0, the one by "
        "which the coordinator sees this host.",
    )
    lease_s: float = Field(
        default=10, ge=0.1, le=3600, description="Seconds that blocks stay reserved for a prefill worker that has gone silent."
    )
