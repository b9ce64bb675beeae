"""Plans of ``splitserve up`` for tests."""

from __future__ import annotations

from pathlib import Path

from splitserve.cli.config import Sources, Value
from splitserve.cli.up import Plan, plan


def planned(model: Path, tmp_path: Path, env: dict[str, str] | None = None, **flags: str) -> Plan:
    given = {"model": str(model), "port": "0", "run_dir": str(tmp_path / "run"), **flags}
    return plan(
        {name: Value(value, f"--{name}") for name, value in given.items()}, Sources.read(None, env or {})
    )
