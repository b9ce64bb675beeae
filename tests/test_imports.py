"""The arrows between folders, as docs/architecture.md draws them: any other import fails here."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SERVING = {"coordinator", "prefill", "decode", "engine", "transport", "worker", "steering"}
VALUES = {"transport.messages", "transport.handoff.protocol", "transport.latency_bounds"}
"""Value types of the wire and of the handoff."""
ALLOWED: dict[str, set[str]] = {  # folders, rooms or files
    "kernels": set(),
    "transport": set(),
    "engine": {"kernels", *VALUES, "transport.process"},
    "prefill": {"engine", "transport"},
    "decode": {"engine", "transport"},
    "worker": {"prefill", "decode", "engine", "transport"},
    "coordinator": {"transport"},
    "steering": {"coordinator.lifecycle.snapshot", "engine.latency_profile", *VALUES},
    "traces": set(),
    "planner": {*SERVING, "traces"},
    "loadgen": {"traces"},
    "cli": {*SERVING, "traces", "planner", "loadgen", "deploy"},
    "deploy": set(),
    "bench": {*SERVING, "kernels", "traces", "planner", "loadgen", "cli", "deploy"},
}
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
            within = ".".join(parts[1:]) + "."
            known = not parts[1:] or any(
                within.startswith(f"{one}.") for one in (*ALLOWED[folder], folder, "__version__")
            )
            if parts[0] == "splitserve" and not known:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
            if parts[0] == "torch" and folder not in MAY_IMPORT_TORCH and "movers" not in path.parts:
                wrong.append(f"{path.relative_to(ROOT)} imports torch")
    assert not wrong, wrong


READER = "splitserve.coordinator.generate.reader.reader_process"


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        ("splitserve.cli.main, splitserve.cli.coordinator", {"torch", "httpx", "rich", "PIL"}),
        (READER, {"torch", "httpx", "uvicorn", "starlette", "prometheus_client", "PIL"}),
    ],
)
def test_a_process_starts_without_what_it_has_no_use_for(modules: str, without: set[str]) -> None:
    """The coordinator and the process that reads large bodies for it: each start would pay for it."""
    code = f"import sys, {modules}; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], timeout=200, check=True, stdout=-1, text=True)
    assert not without & set(run.stdout.split())


PURE = [
    *(
        f"splitserve.coordinator.lifecycle.{path.stem}"
        for path in sorted((ROOT / "coordinator/lifecycle").glob("*.py"))
    ),
    "splitserve.coordinator.dashboard.diagnosis",
    "splitserve.coordinator.dashboard.event_log",
    "splitserve.coordinator.dashboard.findings",
    "splitserve.coordinator.dashboard.queueing",
    "splitserve.steering.controller",
    "splitserve.steering.steering",
    "splitserve.coordinator.tenants.buckets",
    *(
        f"splitserve.{folder}.{path.stem}"
        for folder in ("prefill", "decode")
        for path in sorted((ROOT / folder).glob("*.py"))
    ),
    "splitserve.worker.roles",
    "splitserve.engine.cache.block_manager",
    "splitserve.engine.cache.offload",
    "splitserve.engine.role_core",
    "splitserve.transport.handoff.held_back",
    "splitserve.transport.handoff.reachability",
    "splitserve.transport.handoff.sender",
    "splitserve.transport.handoff.receiver",
]


VIRTUAL = ["splitserve.worker.loop", "splitserve.planner.simulator.simulation"]
"""What runs under virtual time."""


def test_the_pure_cores_and_the_worker_know_no_sockets_and_no_torch() -> None:
    names = ", ".join([*PURE, *VIRTUAL])
    code = (
        f"import sys, {names}; sys.exit(bool({{'torch', 'zmq', 'uvicorn', 'starlette'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=200, check=False).returncode == 0


@pytest.mark.parametrize("name", PURE)
def test_the_pure_cores_ask_no_clock_and_draw_no_chance(name: str) -> None:
    path = ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py")
    assert not {"time", "random", "secrets", "threading", "os"} & {
        imported.split(".")[0] for imported in imports_of(path)
    }


def test_the_lifecycle_imports_messages_and_nothing_else_of_ours() -> None:
    allowed = ("splitserve.coordinator.lifecycle", "splitserve.transport.messages")
    found = {name for path in (ROOT / "coordinator/lifecycle").glob("*.py") for name in imports_of(path)}
    assert not [name for name in found if name.startswith("splitserve") and not name.startswith(allowed)]


ORDERED = [
    "coordinator",
    "kernels",
    "transport",
    "engine",
    "prefill",
    "decode",
    "worker",
    "steering",
    "traces",
    "planner",
    "loadgen",
    "cli",
    "deploy",
    "bench",
]
"""Folders whose files and rooms can be put in an order in which each imports only earlier ones, at every
level."""


def test_only_the_http_room_knows_uvicorn() -> None:
    """Its protocols override private members of uvicorn; everything else sees Call, CallHandler and
    ListeningServer."""
    files = {
        path
        for path in (ROOT / "coordinator").rglob("*.py")
        if any(n.split(".")[0] == "uvicorn" for n in imports_of(path))
    }
    assert files
    assert {path.parent for path in files} == {ROOT / "coordinator" / "http"}


@functools.cache
def module_imports() -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """Every file and the files it imports (for type checking too), as paths without the
    suffix."""
    paths = {
        path.relative_to(ROOT).with_suffix("").parts: path
        for folder in ALLOWED
        for path in (ROOT / folder).rglob("*.py")
    }
    found: dict[tuple[str, ...], set[tuple[str, ...]]] = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                base = ("splitserve", *name[:-1])[: len(name) + 1 - node.level] if node.level else ()
                module = (*base, *(node.module.split(".") if node.module else ()))[1:]
                found[name] |= {
                    (*module, alias.name) if (*module, alias.name) in paths else module
                    for alias in node.names
                }
            elif isinstance(node, ast.Import):
                found[name] |= {tuple(alias.name.split(".")[1:]) for alias in node.names}
    return {name: (imported & paths.keys()) - {name} for name, imported in found.items()}


def circle_among(children: dict[str, set[str]]) -> list[str]:
    """What is left of a graph once everything that imports nothing more is taken away: empty, or it holds a
    circle."""
    while free := [name for name, imported in children.items() if not imported & children.keys()]:
        children = {name: imported for name, imported in children.items() if name not in free}
    return sorted(children)


def circle_at(level: tuple[str, ...], imports: dict[tuple[str, ...], set[tuple[str, ...]]]) -> list[str]:
    """Return the names right below ``level`` that import each other in a circle, directly or by others;
    ``()`` is the root."""
    depth, children = len(level), dict[str, set[str]]()
    for name in [name for name in imports if name[:depth] == level]:
        inside = {imported[depth] for imported in imports[name] if imported[:depth] == level}
        children[name[depth]] = (children.get(name[depth], set()) | inside) - {name[depth]}
    return circle_among(children)


def test_no_circle_of_the_folders_at_the_root() -> None:
    assert not circle_at((), module_imports())


@pytest.mark.parametrize("folder", ORDERED)
def test_no_circle_of_folders_or_files(folder: str) -> None:
    imports = module_imports()
    levels = {name[:depth] for name in imports if name[0] == folder for depth in range(1, len(name))}
    wrong = {"/".join(level): left for level in sorted(levels) if (left := circle_at(level, imports))}
    assert not wrong, wrong
