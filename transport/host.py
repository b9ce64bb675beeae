"""Which machine this is, as far as sharing memory goes, and the address it is reached at."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_identity() -> str:
    """Equal in two processes exactly if one can map the other's memory: same boot, same process namespace, same user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{socket.gethostname()}/{boot}/{namespace}/{os.getuid()}"


def advertised_address(bound: str, host: str) -> str:
    """The address to give to others: ``bound`` (tcp://anything:port) with ``host`` in place of what was listened on."""
    port = bound.rpartition(":")[2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
