"""The hosts that images may be fetched from: what ``--image-domains`` lists, and which addresses a listed
name may stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv6Network, ip_address
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:  # slow to import, and most servers fetch nothing
    import httpx

NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
PRIVATE_MARK, BELOW = "+", "*."
USUAL_PORTS = (80, 443)
SCHEMES = {"http": 80, "https": 443}
GLOBAL_UNICAST = IPv6Network("2000::/3")
"""Without the addresses that hold an IPv4 address: mapped ones and those of NAT64."""
TUNNELS = IPv6Network("2002::/16"), IPv6Network("2001::/32")
"""6to4 and Teredo, which hold an IPv4 address, too."""
CLOUD_ADDRESS = "168.63.129.16"
"""Azure's platform, which only its machines reach, at a public address."""


@dataclass(frozen=True, slots=True)
class ListedHost:
    """One entry of ``--image-domains``."""

    name: str  # in ASCII and lower case, or an IP address as Python writes it
    below: bool  # its subdomains, not itself
    port: int | None  # None: USUAL_PORTS
    may_be_private: bool

    @classmethod
    def of(cls, entry: str) -> Self:
        """Raises ValueError."""
        import httpx

        rest = entry.removeprefix(PRIVATE_MARK)
        below = rest.startswith(BELOW)
        try:
            url = httpx.URL(f"any://{rest.removeprefix(BELOW)}")
        except httpx.InvalidURL:
            url = httpx.URL("")
        name, literal = _host(url)
        if url.port is not None and not 0 < url.port < 1 << 16:
            raise ValueError(f"{entry!r} has no port from 1 to {(1 << 16) - 1}")
        if not name or url.userinfo or url.raw_path not in (b"", b"/") or url.fragment or (below and literal):
            raise ValueError(
                f"{entry!r} is no host; give names such as example.com, *.example.com or example.com:8080, "
                f"or IP addresses, and {PRIVATE_MARK} before names that may have private addresses"
            )
        return cls(name, below, url.port, literal or entry.startswith(PRIVATE_MARK))

    def includes(self, name: str, port: int) -> bool:
        named = name.endswith(f".{self.name}") if self.below else name == self.name
        return named and (port in USUAL_PORTS if self.port is None else port == self.port)


class ImageHosts:
    """All entries."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises ValueError."""
        self._listed = [ListedHost.of(entry) for entry in entries]

    def check(self, url: httpx.URL) -> ListedHost:
        """Return the entry that allows a URL. Raises ValueError with a clause about the URL."""
        if url.scheme not in SCHEMES or url.userinfo:
            raise ValueError("is no plain http or https address of an image")
        name, _ = _host(url)
        port = port_of(url)
        found = [entry for entry in self._listed if name and entry.includes(name, port)]
        if not found:
            raise ValueError("has a host or port that is none of this server's --image-domains")
        return max(found, key=lambda entry: entry.may_be_private)


def port_of(url: httpx.URL) -> int:
    return SCHEMES[url.scheme] if url.port is None else url.port


def is_public(address: str) -> bool:
    """Whether an IP address is one of the open internet."""
    found = ip_address(address)
    if not found.is_global or found.is_multicast or address == CLOUD_ADDRESS:
        return False
    return found.version == 4 or (found in GLOBAL_UNICAST and not any(found in net for net in TUNNELS))


def _host(url: httpx.URL) -> tuple[str, bool]:
    """Return a URL's host, and whether it is an IP address. The empty host: it is no name."""
    host = url.raw_host.decode("ascii")
    try:
        return ("", False) if "%" in host else (str(ip_address(host)), True)
    except ValueError:
        return (host if len(host) < 254 and NAME.fullmatch(host) else "", False)
