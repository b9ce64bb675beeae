"""HEALTHCHECK of the image: exit status 0 where this container's process can do its work.

A coordinator answers ``/health``. A worker has no HTTP server: its coordinator watches it. Needs only Python.
"""

from __future__ import annotations

import json
import ssl
import sys
import tempfile
import urllib.request
from pathlib import Path

WORKERS = {"prefill", "decode", "worker"}
TIMEOUT_S = 4.0


def main() -> int:
    """Return the exit status."""
    arguments = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")
    if WORKERS & set(arguments[:4]):
        return 0
    doors = sorted(Path(tempfile.gettempdir()).glob("splitserve-*/run-*/coordinator-*.json"))
    if not doors:
        print("no coordinator runs here yet", file=sys.stderr)
        return 1
    unverified = ssl._create_unverified_context()  # this very container
    url = json.loads(doors[0].read_text(encoding="utf-8"))["url"]
    with urllib.request.urlopen(f"{url}/health", timeout=TIMEOUT_S, context=unverified) as answer:
        return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
