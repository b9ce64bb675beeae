"""The launch configuration of a plan: a file for ``splitserve up --config`` and the commands that start
single workers of each kind, or values of the Helm chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ...traces.console import writing
from ..errors import SimulationError
from ..simulator.cluster import PoolRole
from .candidates import Candidate, Group, Hardware, Kind

SECTIONS: dict[PoolRole, str] = {"prefill": "prefill", "decode": "decode", "colocated": "worker"}
Section = dict[str, str | int]
NODE_LABEL = "gpu"
"""Label of nodes by their GPUs' name, which pods select by where there are several."""


class _Pool(NamedTuple):
    """``options``: of its workers; ``own``: where they differ from the role's first pool, whose is None."""

    group: Group
    kind: Kind
    options: Section
    own: Section | None


def write_launch(path: Path, hardware: Hardware, candidate: Candidate, comment: str = "") -> None:
    """Write the plan's cluster: workers of each role and kind, their steps and batches, their profile's
    memory and types, and on which GPUs they run. A name that ends in ``values.yaml`` gets the Helm chart's
    form. ``comment``: one line of comment for the reader. Raises SimulationError."""
    longest = min(kind.profile.memory.longest for _, kind in hardware.pools(candidate))
    pools = list[_Pool]()
    for group, kind in hardware.pools(candidate):
        options = {**_steps(group, candidate), **_numerics(kind), **_memory(kind), "max_model_len": longest}
        first = next((other.options for other in pools if other.group.role == group.role), None)
        own = None if first is None else {k: v for k, v in options.items() if first.get(k) != v}
        pools.append(_Pool(group, kind, options, own))
    content = (_values if path.name.endswith("values.yaml") else _configuration)(pools, longest)
    comments = [f"# {line}\n" for line in (comment, *_remarks(pools)) if line]
    with writing(path, SimulationError):
        path.write_text("".join(comments) + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _values(pools: list[_Pool], longest: int) -> dict[str, Any]:
    several = len({kind.stock for _, kind, *_ in pools}) > 1
    made = {
        group.role if own is None else f"{group.role}-{index}": {
            "role": SECTIONS[group.role],
            "replicas": group.count,
            "options": options,
            "gpus": kind.gpus,
            **({"nodeSelector": {NODE_LABEL: kind.stock}} if several and kind.stock else {}),
        }
        for index, (group, kind, options, own) in enumerate(pools)
    }
    chart = {"prefill": None, "decode": None}  # those that the chart's own values have
    return {"coordinator": {"options": {"max_model_len": longest}}, "pools": chart | made}


def _configuration(pools: list[_Pool], longest: int) -> dict[str, Any]:
    up: dict[str, Any] = {"prefill": 0, "decode": 0}
    content: dict[str, Any] = {"up": up, "coordinator": {"max_model_len": longest}}
    for group, kind, options, own in pools:
        place = _place(kind)
        if own is None:
            content[SECTIONS[group.role]] = options
        if own is None and group.role != "colocated":
            up |= {group.role: group.count, **{f"{name}_{group.role}": text for name, text in place.items()}}
        else:
            role = "mixed" if group.role == "colocated" else group.role
            differs = {"options": own} if own else {}
            up.setdefault("pools", []).append({"role": role, "count": group.count, **differs, **place})
    return content


def _place(kind: Kind) -> dict[str, str]:
    """Options of sbatch and resources of Ray for GPUs of this kind, where its inventory names them."""
    if not kind.stock:
        return {}
    return {
        "sbatch": f"--gpus-per-node {kind.stock}:{kind.gpus}",  # --gpus may be of several nodes
        "ray": f"accelerator_type:{kind.stock.upper()}=0.001",
    }


def _steps(group: Group, candidate: Candidate) -> Section:
    mover: Section = {"mover": candidate.mover} if candidate.mover else {}
    of_prompts: Section = {"max_batch_tokens": candidate.max_batch_tokens}
    of_sequences: Section = {"max_num_seqs": group.max_num_seqs}
    by_role: dict[PoolRole, Section] = {
        "prefill": of_prompts,
        "decode": of_sequences,
        "colocated": {"start_as": "mixed", **of_prompts, **of_sequences},
    }
    return {**by_role[group.role], **mover}


def _numerics(kind: Kind) -> Section:
    numerics = kind.profile.numerics
    return numerics.model_dump() if numerics is not None else {}


def _memory(kind: Kind) -> Section:
    memory = kind.profile.memory
    sizes: Section = {"block_size": memory.block_size, "num_blocks": memory.num_blocks}
    return {**sizes, "tensor_parallel_size": kind.gpus, "expert_parallel": kind.profile.expert_parallel}


def _remarks(pools: list[_Pool]) -> list[str]:
    """Comments on settings that the sections cannot express."""
    remarks, kinds = list[str](), [pool.kind for pool in pools]
    if len({kind.name for kind in kinds}) > 1:
        commands = (
            f"`splitserve {SECTIONS[group.role]}{_flags(own or {})}` on {kind.name} ({group.count} of them)"
            for group, kind, _, own in pools
        )
        remarks += [
            "`splitserve up` starts all workers on one machine. Where each kind of hardware is a "
            "machine of its own, start there,",
            "each with --config, this file, and what docs/hosts.md says: `splitserve coordinator`, "
            + ", ".join(commands),
        ]
    if len({kind.stock for kind in kinds}) > 1:
        remarks.append(
            f"On Kubernetes nodes need labels: `kubectl label node NODE {NODE_LABEL}={kinds[0].stock}`"
        )
    if len({kind.profile.memory.block_size for kind in kinds}) > 1:
        remarks.append(
            "The profiles' block sizes differ, and so workers would exchange no blocks: profile "
            "again with one --block-size"
        )
    if len({kind.profile.numerics for kind in kinds if kind.profile.numerics is not None}) > 1:
        remarks.append(
            "The profiles were measured in different types, and so workers would exchange no "
            "blocks: profile again in one"
        )
    return remarks


def _flags(options: Section) -> str:
    flags = {name.replace("_", "-"): value for name, value in options.items()}
    return "".join(
        f" --{'' if value else 'no-'}{name}" if isinstance(value, bool) else f" --{name} {value}"
        for name, value in flags.items()
    )
