"""Nodes of a trial: network namespaces on one bridge, with hostnames. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

HERE, BRIDGE = "10.99.7.254", f"ss{os.getpid()}"
"""The address of the trial's own namespace, and the bridge that has it."""
INSIDE = "TRIAL_INSIDE"


def inside() -> None:
    """Run this program again in a network namespace of its own, unless it does already."""
    if INSIDE not in os.environ:
        command = ["unshare", "--net", sys.executable, *sys.argv]
        os.execvpe("unshare", command, {**os.environ, INSIDE: "1"})


@contextlib.contextmanager
def nodes(names: Sequence[str]) -> Iterator[None]:
    """Namespaces, each at a port of the bridge."""
    try:
        ip("link", "set", "lo", "up")
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{HERE}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for name in names:
            inside_end, port = f"{BRIDGE}-{name}0", f"{BRIDGE}-{name}"
            ip("netns", "add", port)
            ip("link", "add", port, "type", "veth", "peer", "name", inside_end)
            ip("link", "set", inside_end, "netns", port)
            ip("link", "set", port, "master", BRIDGE, "up")
            ip("-n", port, "addr", "add", f"{address(name)}/24", "dev", inside_end)
            ip("-n", port, "link", "set", inside_end, "up")
            ip("-n", port, "link", "set", "lo", "up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", f"{BRIDGE}-{name}"], check=False)


def address(name: str) -> str:
    """Return a node's address. ``name``: one letter."""
    return f"10.99.7.{ord(name) - ord('a') + 1}"


def on_node(name: str) -> list[str]:
    """Return what runs a command on a node."""
    inside = ["nsenter", f"--net=/run/netns/{BRIDGE}-{name}"]  # ip netns exec would hide the cgroups
    return [*inside, "unshare", "--uts", "sh", "-c", f'hostname node-{name} && exec "$@"', "sh"]


def node_of(pid: int) -> str:
    """Return the node of a process; empty: none."""
    return ip("netns", "identify", str(pid)).strip().removeprefix(f"{BRIDGE}-")


def cut(name: str) -> None:
    """Part a node from all others."""
    ip("link", "set", f"{BRIDGE}-{name}", "down")


def join(name: str) -> None:
    """End the cut."""
    ip("link", "set", f"{BRIDGE}-{name}", "up")


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, timeout=20, stdout=subprocess.PIPE, text=True)
    return done.stdout
