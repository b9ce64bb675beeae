"""The settings of a worker's process: for a prefill worker, for a decode worker, and for one that may play
both roles."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field

from ..engine.settings import WorkerSettings
from ..transport.messages.messages import Role
from .roles import worker_name

DEFAULT_BATCH_TOKENS = {"cpu": 512, "cuda": 2048}


def two_ports_up(address: str) -> str:
    """Return tcp://HOST:PORT with a port that is higher by two; * stays."""
    host, _, port = address.rpartition(":")
    return address if port == "*" else f"{host}:{int(port) + 2}"


class PeerSettings(WorkerSettings):
    """Receives KV blocks of other workers."""

    listen: str = Field(
        default="tcp://127.0.0.1:*",
        pattern=r"^tcp://([^\s:]+|\[[0-9a-fA-F:.]+\]):(\d+|\*)$",
        description="Where other workers reach this one: tcp://HOST:PORT; port *: the system chooses.",
    )
    data_listen: str = Field(
        default="tcp://127.0.0.1:*",
        pattern=r"^tcp://([^\s:]+|\[[0-9a-fA-F:.]+\]):(\d+|\*)$",
        description="Where KV blocks arrive by the tcp mover: tcp://HOST:PORT; port *: the system chooses.",
    )
    advertise_host: str = Field(
        default="",
        pattern=r"^([0-9A-Za-z_.-]{0,255}|[0-9a-fA-F]*:[0-9a-fA-F:.]*:[0-9a-fA-F.]*(%[0-9A-Za-z]+)?)$",
        description="Host name or address that other workers connect to. Default: that of listen, or "
        "for 0.0.0.0 the one by which the coordinator sees this host.",
    )


class PrefillSettings(PeerSettings):
    """Computes prompts in chunks and hands their KV blocks to decode workers."""

    role: ClassVar[str] = "prefill"

    max_batch_tokens: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="Most prompt tokens in one step: the chunk budget. 0: 512 on CPUs, 2048 on GPUs.",
    )
    max_num_seqs: int = Field(default=64, ge=1, le=65_536, description="Most prompts in one step.")

    @property
    def begins_as(self) -> tuple[Role, ...]:
        """The roles that the process plays at first."""
        return ("prefill",)

    def chunk_budget(self, device_type: str) -> int:
        """Return ``max_batch_tokens``, or the default for a ``cpu`` or a ``cuda`` device."""
        return self.max_batch_tokens or DEFAULT_BATCH_TOKENS[device_type]


class DecodeSettings(PeerSettings):
    """Generates tokens in a continuous batch, from KV blocks that prefill workers put into its cache."""

    role: ClassVar[str] = "decode"

    max_num_seqs: int = Field(default=64, ge=1, le=65_536, description="Most sequences in the batch.")
    num_speculative_tokens: int = Field(
        default=0,
        ge=0,
        le=16,
        description="Most tokens of a sequence that a step drafts; they change no token. 0: none.",
    )

    @property
    def begins_as(self) -> tuple[Role, ...]:
        """The roles that the process plays at first."""
        return ("decode",)


class FlexibleSettings(DecodeSettings, PrefillSettings):
    """Runs as a prefill or a decode worker, and changes from one to the other on demand: weights, KV
    blocks and prefix cache stay. Or it is both, and stays so. As a prefill worker it listens two ports
    higher."""

    role: ClassVar[str] = "worker"

    start_as: Literal["prefill", "decode", "mixed"] = Field(
        default="decode",
        description="The first role. mixed: both for good; it generates for the prompts that it computes.",
    )
    borrow: bool = Field(
        default=False,
        description="Prefer the role of start_as, and take work of the other one that would otherwise wait.",
    )
    max_num_seqs: int = Field(
        default=64, ge=1, le=65_536, description="Most sequences in its batch, and most prompts in a step."
    )

    @property
    def begins_as(self) -> tuple[Role, ...]:
        """The roles that the process plays at first."""
        return ("decode", "prefill") if self.start_as == "mixed" or self.borrow else (self.start_as,)

    @property
    def home(self) -> Literal["", Role]:
        """The role that it prefers, of one that borrows."""
        return self.start_as if self.borrow and self.start_as != "mixed" else ""

    def in_role(self, role: str) -> Self:
        """Return the settings of this role: its name, and a prefill worker's ports."""
        ports = ("listen", "data_listen") if role == "prefill" else ()
        own = {name: two_ports_up(getattr(self, name)) for name in ports}
        return self.model_copy(update={"name": worker_name(self.worker_id, role), **own})
