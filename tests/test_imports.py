"""The arrows between folders, as docs/architecture.md draws them: any other import fails here."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SERVING = {"coordinator", "prefill", "decode", "engine", "transport", "worker", "steering"}
ALLOWED: dict[str, set[str]] = {
    "kernels": set(),
    "transport": set(),
    "engine": {"kernels", "transport"},
    "prefill": {"engine", "transport", "worker"},
    "decode": {"engine", "transport", "worker"},
    "worker": {"prefill", "decode", "engine", "transport"},
    "coordinator": {"transport", "steering"},
    "steering": {"coordinator", "engine", "transport"},
    "planner": SERVING,
    "loadgen": {"transport", "planner", "cli"},
    "cli": {*SERVING, "planner", "loadgen", "deploy"},
    "deploy": {"coordinator", "worker", "engine", "transport", "cli"},
    "bench": {*SERVING, "kernels", "planner", "loadgen", "cli", "deploy"},
}
FILES_TOO = {"coordinator": {"splitserve.engine.latency_profile"}}
MAY_IMPORT_TORCH = {"kernels", "engine", "worker", "bench", "cli", "planner"}


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names of everything a file imports."""
    package = ["splitserve", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])])


@pytest.mark.parametrize("folder", ALLOWED)
def test_only_the_drawn_arrows(folder: str) -> None:
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name in imports_of(path):
            parts = name.split(".")
            known = len(parts) < 2 or parts[1] in ALLOWED[folder] | {folder, "__version__"} or name in FILES_TOO.get(folder, ())
            if parts[0] == "splitserve" and not known:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
            if parts[0] == "torch" and folder not in MAY_IMPORT_TORCH and "movers" not in path.parts:
                wrong.append(f"{path.relative_to(ROOT)} imports torch")
    assert not wrong, wrong


def test_the_coordinator_starts_without_torch() -> None:
    code = "import sys, splitserve.coordinator.main, splitserve.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200, check=False).returncode == 0


PURE = [
    "splitserve.coordinator.lifecycle.lifecycle",
    "splitserve.coordinator.lifecycle.routing",
    "splitserve.coordinator.lifecycle.pools",
    "splitserve.coordinator.lifecycle.waiting_line",
    "splitserve.coordinator.lifecycle.fair_shares",
    "splitserve.coordinator.lifecycle.forecast",
    "splitserve.coordinator.dashboard.diagnosis",
    "splitserve.coordinator.dashboard.event_log",
    "splitserve.coordinator.dashboard.queueing",
    "splitserve.steering.controller",
    "splitserve.steering.steering",
    "splitserve.coordinator.tenants.buckets",
    "splitserve.prefill.core",
    "splitserve.decode.core",
    "splitserve.engine.cache.block_manager",
    "splitserve.transport.handoff.sender",
    "splitserve.transport.handoff.receiver",
]


def test_the_pure_cores_know_no_sockets_and_no_torch() -> None:
    names = ", ".join(PURE)
    code = f"import sys, {names}; sys.exit(bool({{'torch', 'zmq', 'uvicorn', 'starlette'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=200, check=False).returncode == 0


@pytest.mark.parametrize("name", PURE)
def test_the_pure_cores_ask_no_clock_and_draw_no_chance(name: str) -> None:
    path = ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")
    assert not {"time", "random", "secrets", "threading", "os"} & {imported.split(".")[0] for imported in imports_of(path)}
