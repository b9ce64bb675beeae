"""The launch configuration of a plan: a file for ``splitserve up --config``, or for the sections of single workers."""

from __future__ import annotations

from pathlib import Path

import yaml

from ..errors import SimulationError
from .candidates import Candidate


def write_launch(path: Path, candidate: Candidate, said: str = "") -> None:
    """Colocated workers are what ``splitserve up --mixed`` starts. ``said``: one line for whoever reads the file, such as which hardware
    the workers are for. Raises SimulationError."""
    mover = {"mover": candidate.mover} if candidate.mover else {}
    of_role: dict[str, dict[str, str | int]] = {
        "prefill": {"max_batch_tokens": candidate.max_batch_tokens, **mover},
        "decode": {"max_num_seqs": candidate.max_num_seqs, **mover},
    }
    content: dict[str, dict[str, str | int]] = {"up": {"prefill": candidate.prefill, "decode": candidate.decode}}
    if candidate.prefill:
        content |= of_role
    if candidate.colocated:
        content["up"]["mixed"] = candidate.colocated
        content["worker"] = {**of_role["prefill"], **of_role["decode"]}
    try:
        path.write_text((f"# {said}\n" if said else "") + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise SimulationError(f"cannot write {path}: {error.strerror or error}") from None
