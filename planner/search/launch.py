"""The launch configuration of a plan: a file for ``splitserve up --config``, or for the sections of single workers."""

from __future__ import annotations

from pathlib import Path

import yaml

from ..errors import SimulationError
from .candidates import Candidate


def write_launch(path: Path, candidate: Candidate) -> None:
    """Raises SimulationError, also for colocated workers, which splitserve has none of."""
    if not candidate.prefill:
        raise SimulationError(
            "colocated workers are not what splitserve runs: there is no launch configuration; use a server with chunked prefill"
        )
    mover = {"mover": candidate.mover} if candidate.mover else {}
    content = {
        "up": {"prefill": candidate.prefill, "decode": candidate.decode},
        "prefill": {"max_batch_tokens": candidate.max_batch_tokens, **mover},
        "decode": {"max_num_seqs": candidate.max_num_seqs, **mover},
    }
    try:
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise SimulationError(f"cannot write {path}: {error.strerror or error}") from None
