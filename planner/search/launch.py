"""The launch configuration of a plan: a file for ``splitserve up --config`` and the commands that start
single workers of each kind, or values of the Helm chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..errors import SimulationError
from ..simulator.cluster import PoolRole
from .candidates import Candidate, Hardware, Kind

SECTIONS: dict[PoolRole, str] = {"prefill": "prefill", "decode": "decode", "colocated": "worker"}
Section = dict[str, str | int]


def write_launch(path: Path, hardware: Hardware, candidate: Candidate, comment: str = "") -> None:
    """Write the plan's cluster: workers of each role, their steps and batches, their profile's memory and
    types. Colocated workers are what ``splitserve up --mixed`` starts. A name that ends in ``values.yaml``
    gets the Helm chart's form. ``comment``: one line of comment for the reader. Raises SimulationError."""
    pools = {role: (count, kind) for role, count, kind in hardware.pools(candidate)}
    longest = min(kind.profile.memory.max_model_len for _, kind in pools.values())
    options = {
        role: {**_steps(role, candidate), **_numerics(kind), **_memory(kind), "max_model_len": longest}
        for role, (_, kind) in pools.items()
    }
    content: dict[str, Any]
    if path.name.endswith("values.yaml"):
        content = {
            "coordinator": {"options": {"max_model_len": longest}},
            "pools": {"prefill": None, "decode": None}  # those that the chart's own values have
            | {
                role: {
                    "role": SECTIONS[role],
                    "replicas": count,
                    "options": options[role],
                    "resources": {"limits": {"nvidia.com/gpu": kind.gpus}},
                }
                for role, (count, kind) in pools.items()
            },
        }
    else:
        up: Section = {"prefill": candidate.prefill, "decode": candidate.decode}
        if candidate.colocated:
            up["mixed"] = candidate.colocated
        content = {"up": up, "coordinator": {"max_model_len": longest}}
        content |= {SECTIONS[role]: section for role, section in options.items()}
    comments = [f"# {line}\n" for line in (comment, *_remarks(pools)) if line]
    try:
        path.write_text("".join(comments) + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise SimulationError(f"cannot write {path}: {error.strerror or error}") from None


def _steps(role: PoolRole, candidate: Candidate) -> Section:
    mover: Section = {"mover": candidate.mover} if candidate.mover else {}
    of_prompts: Section = {"max_batch_tokens": candidate.max_batch_tokens}
    of_sequences: Section = {"max_num_seqs": candidate.max_num_seqs}
    by_role: dict[PoolRole, Section] = {
        "prefill": of_prompts,
        "decode": of_sequences,
        "colocated": {"start_as": "mixed", **of_prompts, **of_sequences},
    }
    return {**by_role[role], **mover}


def _numerics(kind: Kind) -> Section:
    numerics = kind.profile.numerics
    return numerics.model_dump() if numerics is not None else {}


def _memory(kind: Kind) -> Section:
    memory = kind.profile.memory
    return {"block_size": memory.block_size, "num_blocks": memory.num_blocks}


def _remarks(pools: dict[PoolRole, tuple[int, Kind]]) -> list[str]:
    """Comments on settings that the sections cannot express."""
    remarks = []
    if len({kind.name for _, kind in pools.values()}) > 1:
        whose = ", ".join(
            f"`splitserve {SECTIONS[role]}` on {kind.name} ({count} of them)"
            for role, (count, kind) in pools.items()
        )
        remarks.append(
            "`splitserve up` starts all workers on one machine. Where each kind of hardware is a "
            "machine of its own, start there,"
        )
        remarks.append(
            f"each with --config, this file, and what docs/hosts.md says: `splitserve coordinator`, {whose}"
        )
    if len({kind.profile.memory.block_size for _, kind in pools.values()}) > 1:
        remarks.append(
            "The profiles' block sizes differ, and so workers would exchange no blocks: profile "
            "again with one --block-size"
        )
    if len({kind.profile.numerics for _, kind in pools.values() if kind.profile.numerics is not None}) > 1:
        remarks.append(
            "The profiles were measured in different types, and so workers would exchange no "
            "blocks: profile again in one"
        )
    spanning = sorted({(kind.name, kind.gpus) for _, kind in pools.values() if kind.gpus > 1})
    remarks += [
        f"A worker of {name} is {gpus} GPUs in its profile; a worker that `splitserve` starts has one"
        for name, gpus in spanning
    ]
    return remarks
