"""The URL of what listens. Apart from the server itself, which commands need not import."""

from __future__ import annotations


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """Where clients on this host reach what listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
