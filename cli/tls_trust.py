"""Which certificates the commands trust when they talk to a server over TLS."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Literal

from ..coordinator.run_folder import find_door
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
