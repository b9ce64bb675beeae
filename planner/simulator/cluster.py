"""What is simulated: pools of workers, the links between them, the coordinator's options, failures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...coordinator.lifecycle.routing import Policy
from ...engine.latency_profile import Memory, Profile
from ..errors import SimulationError

PoolRole = Literal["prefill", "decode", "colocated"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Pool(_Part):
    """``count`` equal workers. A colocated one is what ``splitserve up --mixed`` starts: of both roles over
    one KV cache, which share their steps."""

    role: PoolRole
    count: Annotated[int, Field(ge=1, le=100_000)]
    profile: Profile
    max_batch_tokens: Annotated[int, Field(ge=1)] = 512  # of prompts in a step
    max_num_seqs: Annotated[int, Field(ge=1, le=65_536)] = 64  # in a decode batch
    num_blocks: Annotated[int, Field(ge=2)] | None = None  # None: as profiled
    # None: as the profile's mover; else the slower of both
    link_bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    link_latency_s: Annotated[float, Field(ge=0)] = 0.0  # added to each message
    flexible: bool = False  # its workers can change their roles; ``role`` is the one that they begin with
    borrow: bool = False  # its workers take work of the other role where that would otherwise wait

    @model_validator(mode="after")
    def _has_a_role_to_change(self) -> Self:
        if (self.flexible or self.borrow) and self.role == "colocated":
            raise ValueError("a colocated worker is of both roles already: it is not flexible")
        return self

    @property
    def memory(self) -> Memory:
        memory = self.profile.memory
        return memory.model_copy(update={"num_blocks": self.num_blocks or memory.num_blocks})

    @property
    def bytes_per_s(self) -> float:
        profiled = self.profile.handoff.bytes_per_s
        return min(profiled, self.link_bytes_per_s) if self.link_bytes_per_s else profiled

    @property
    def message_s(self) -> float:
        return self.profile.handoff.message_s + self.link_latency_s


class Failure(_Part):
    """The worker with this name dies at ``at_s`` (seconds of the trace) and is started again."""

    worker: str
    at_s: Annotated[float, Field(ge=0)]


class Cluster(_Part):
    """All that a simulation needs beside the trace."""

    pools: Annotated[tuple[Pool, ...], Field(min_length=1)]
    routing: Policy = "hybrid"
    max_queue: Annotated[int, Field(ge=0)] = 1024
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    # seconds a request spends in HTTP, chat template and tokenizer
    coordinator_s: Annotated[float, Field(ge=0)] = 1e-3
    # they slow each other where their profiles know ``contention``
    workers_per_host: Annotated[int, Field(ge=1)] = 1
    failures: tuple[Failure, ...] = ()
    # of one worker; None: none but ``failures``
    mean_seconds_between_failures: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        roles = {pool.role for pool in self.pools}
        if roles == {"decode", "colocated"}:
            raise ValueError(
                "colocated workers compute prompts for themselves alone: decode workers need "
                "prefill workers too"
            )
        if "colocated" not in roles and roles != {"prefill", "decode"}:
            raise ValueError("a cluster needs prefill and decode workers, or colocated ones")
        sizes = {pool.profile.memory.block_size for pool in self.pools}
        if len(sizes) > 1:
            raise ValueError(f"all profiles of a cluster need one block size, not {sorted(sizes)} tokens")
        return self

    @property
    def num_workers(self) -> int:
        """Devices: a colocated worker is one."""
        return sum(pool.count for pool in self.pools)

    @property
    def num_hosts(self) -> int:
        """Workers are dealt out to them in turn, in the order of the pools, so that a host has some of each
        role."""
        return -(-self.num_workers // self.workers_per_host)


def alone_on_their_hosts(workers_per_host: int, profiles: Iterable[Profile]) -> str:
    """Return a warning where workers share hosts and their profiles lack the cost of that; empty: no
    warning."""
    unknown = (
        sorted({profile.name for profile in profiles if profile.contention is None})
        if workers_per_host > 1
        else []
    )
    if not unknown:
        return ""
    return (
        f"{workers_per_host} workers to a host change nothing for {', '.join(unknown)}, whose "
        "profile has no `contention`: what sharing a "
        "host costs them is not known and left out. `splitserve profile` measures it on CPUs."
    )


def read_yaml(path: Path, what: str) -> Any:
    """Raises SimulationError."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SimulationError(
            f"cannot read {what} {path}: {getattr(error, 'strerror', None) or error}"
        ) from None


def read_cluster(path: Path) -> Cluster:
    """From a YAML file, in which ``profile`` is the path of a profile's file, relative to the YAML file.
    Raises SimulationError."""
    content = read_yaml(path, "the cluster")
    try:
        pools = [
            {**pool, "profile": Profile.read(path.parent / pool["profile"])} for pool in content["pools"]
        ]
        return Cluster.model_validate({**content, "pools": pools})
    except (KeyError, TypeError):
        raise SimulationError(f"{path}: it needs a list `pools` with role, count and profile each") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise SimulationError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
