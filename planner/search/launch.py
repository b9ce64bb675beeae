"""The launch configuration of a plan: a file for ``splitserve up --config``, or for the sections of single workers."""

from __future__ import annotations

from pathlib import Path

import yaml

from ..errors import SimulationError
from .candidates import Candidate


def write_launch(path: Path, candidate: Candidate) -> None:
    """Raises SimulationError, also for colocated workers, which splitserve has none of."""
    if candidate.colocated:
        raise SimulationError(
            "the plan is colocated workers, which splitserve does not run: there is no launch configuration; "
            "use a server with chunked prefill"
        )
    content = {
        "up": {"prefill": candidate.prefill, "decode": candidate.decode},
        "prefill": {"max_batch_tokens": candidate.max_batch_tokens},
        "decode": {"max_num_seqs": candidate.max_num_seqs},
    }
    try:
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise SimulationError(f"cannot write {path}: {error.strerror or error}") from None
