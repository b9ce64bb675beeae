"""What every request meets first: hosts and origins, TLS, trusted proxies."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from .errors import CannotStart
from .http.access.access import Access
from .http.access.forwarded import TrustedProxies
from .http.access.tls import TlsFiles
from .http.access.url import is_loopback, listed
from .settings import CoordinatorSettings


@dataclass(frozen=True)
class FrontDoor:
    """The default is for a server on loopback without keys: names of loopback, no other origin, no TLS, no
    proxy."""

    access: Access = field(default_factory=Access)
    admin_access: Access = field(default_factory=Access)
    """Access to the admin port, where a key is always required."""
    tls: TlsFiles | None = None
    proxies: TrustedProxies = field(default_factory=TrustedProxies)


def front_door_of(settings: CoordinatorSettings) -> FrontDoor:
    """Raises CannotStart."""
    origins = listed(settings.allowed_origins)
    hosts = [*listed(settings.allowed_hosts), settings.host, socket.gethostname()]
    private_names = not is_loopback(settings.listen_host)

    def access(keyed: bool) -> Access:
        any_host = ["*"] if keyed and not settings.allowed_hosts else []
        return Access([*hosts, *any_host], origins, private_names=private_names)

    try:
        tls = None if settings.tls_cert is None else TlsFiles(settings.tls_cert, settings.tls_key)
    except ValueError as error:
        raise CannotStart(f"--tls-cert: {error}") from error
    proxies = TrustedProxies(listed(settings.trusted_proxies))
    return FrontDoor(access(settings.tenants_file is not None), access(True), tls, proxies)
