"""Names and addresses of listening servers. Commands import this file without the server."""

from __future__ import annotations

from ipaddress import ip_address


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """Return where clients on this host reach what listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can reach what listens there."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def listed(text: str) -> list[str]:
    """Return what stands between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]
