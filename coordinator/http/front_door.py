"""How both HTTP ports meet the network."""

from __future__ import annotations

from dataclasses import dataclass, field

from .access.access import Access
from .access.forwarded import TrustedProxies
from .access.tls import TlsFiles


@dataclass(frozen=True)
class FrontDoor:
    """The default is for a server on loopback without keys: names of loopback, no other origin, no TLS, no proxy."""

    access: Access = field(default_factory=Access)
    admin_access: Access = field(default_factory=Access)
    """Of the admin port, where a key is always asked for."""
    tls: TlsFiles | None = None
    proxies: TrustedProxies = field(default_factory=TrustedProxies)
