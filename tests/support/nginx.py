"""nginx from Debian on loopback, with a configuration of its own."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAM = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
MAIN = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log warn;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {inside}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, inside: str, port: int) -> Iterator[None]:
    """``inside``: of the http block, with a server that listens on ``port`` of loopback."""
    assert PROGRAM is not None
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, inside=inside))
    process = subprocess.Popen(
        [PROGRAM, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    )
    try:
        deadline = time.monotonic() + 60
        while not _listens(port):
            assert process.poll() is None, (folder / "error.log").read_text()
            assert time.monotonic() < deadline, "nginx did not start"
            time.sleep(0.01)
        yield
    finally:
        process.terminate()
        process.wait(30)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
