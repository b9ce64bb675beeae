"""The arrows between folders, as docs/architecture.md draws them: any other import fails here."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORES = {"coordinator", "prefill", "decode", "engine", "transport"}
ALLOWED: dict[str, set[str]] = {
    "kernels": set(),
    "transport": set(),
    "engine": {"kernels"},
    "prefill": {"engine", "transport"},
    "decode": {"engine", "transport"},
    "coordinator": {"transport"},
    "planner": CORES,
    "deploy": {"coordinator", "prefill", "decode", "engine", "transport", "bench", "planner"},
    "bench": {*CORES, "kernels", "deploy", "planner"},
}
FILES_TOO = {"coordinator": {"splitserve.engine.latency_profile"}, "engine": {"splitserve.transport.sliding_window"}}
"""The pool controller predicts with the model that the simulator runs on, which knows no torch. What stands for no block in a block table
is the same wherever there is one."""
MAY_IMPORT_TORCH = {"kernels", "engine", "bench", "deploy", "planner"}


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
    code = "import sys, splitserve.coordinator.main, splitserve.deploy.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200, check=False).returncode == 0


PURE = [
    "splitserve.coordinator.lifecycle",
    "splitserve.coordinator.routing",
    "splitserve.coordinator.pools",
    "splitserve.coordinator.waiting_line",
    "splitserve.coordinator.fair_shares",
    "splitserve.coordinator.forecast",
    "splitserve.coordinator.diagnosis",
    "splitserve.coordinator.event_log",
    "splitserve.coordinator.queueing",
    "splitserve.coordinator.steering.controller",
    "splitserve.coordinator.steering.steering",
    "splitserve.coordinator.tenants.buckets",
    "splitserve.prefill.core",
    "splitserve.decode.core",
    "splitserve.engine.block_manager",
    "splitserve.transport.handoff_sender",
    "splitserve.transport.handoff_receiver",
]


def test_the_pure_cores_know_no_sockets_and_no_torch() -> None:
    names = ", ".join(PURE)
    code = f"import sys, {names}; sys.exit(bool({{'torch', 'zmq', 'uvicorn', 'starlette'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=200, check=False).returncode == 0


@pytest.mark.parametrize("name", PURE)
def test_the_pure_cores_ask_no_clock_and_draw_no_chance(name: str) -> None:
    path = ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")
    assert not {"time", "random", "secrets", "threading", "os"} & {imported.split(".")[0] for imported in imports_of(path)}
