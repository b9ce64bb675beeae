"""How a command reaches a coordinator's operators' pages: on this host it finds address and admin key by
itself."""

from __future__ import annotations

from pathlib import Path

from ..coordinator.run_folder import find_door
from .checks import read_key


def operator_access(
    url: str, key_file: Path | None, *, admin_port: bool = False
) -> tuple[str, dict[str, str]]:
    """The URL to ask and the headers to send. ``admin_port``: what is asked lies under /admin. Raises
    ConfigError."""
    door = find_door(url)
    if door is not None:
        url = door.admin_url if admin_port else door.url
    if key_file is not None:
        return url, {"authorization": f"Bearer {read_key('--admin-key-file', key_file)}"}
    return url, door.headers() if door is not None else {}
