"""How a command reaches a server: the certificates that it trusts over TLS, and of a coordinator on this host
the operators' pages and their admin key."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Literal

from ..coordinator.run_folder import find_door
from .checks import read_key
from .config import ConfigError


def trust(url: str, ca: Path | None, own: Path | None = None) -> ssl.SSLContext | Literal[False]:
    """For an HTTP client; False where ``url`` is not https: to read the system's certificates takes 40 ms of
    a core.

    Without ``ca`` a coordinator of this user on this host is known by its very certificate, whatever names
    that has; all others are checked against the system's authorities. ``own``: the certificate of a
    coordinator that this process has started. Raises ConfigError.
    """
    if not url.startswith("https:"):
        return False
    try:
        if own is not None:
            return pinned(own)
        if ca is None and (door := find_door(url)) is not None and door.tls_cert is not None:
            return pinned(door.tls_cert)
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError is one
        named = f"--tls-ca: {ca}" if own is None else f"--tls-cert: {own}"
        raise ConfigError(
            f"{named}: {error.strerror or error}; it must be a file of certificates in PEM"
        ) from error
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a server's own certificate will do, too
    return context


def pinned(certificate: Path) -> ssl.SSLContext:
    """Trusts the first certificate in this PEM file alone, under any name. Raises OSError."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    first = certificate.read_text(encoding="ascii", errors="replace").partition(begin)[2].partition(end)[0]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=f"{begin}{first}{end}\n")
    return context


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
