"""The address and scheme of a client behind proxies. Only headers of trusted proxies count. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
_PAIR = re.compile(r'\s*(\w+)="?([^",;]*)"?\s*')


class TrustedProxies:
    """``networks``: addresses, or networks as 10.0.0.0/8."""

    def __init__(self, networks: Iterable[str] = ()) -> None:
        """Raises ValueError."""
        self._networks: list[IPv4Network | IPv6Network] = [
            ip_network(network, strict=False) for network in networks
        ]

    def client_of(self, peer: str, headers: Mapping[bytes, bytes]) -> tuple[str, str | None]:
        """The client's address, and the scheme it used where that is known: of the last proxy that is not
        trusted, or of the peer itself.

        Where ``Forwarded`` and ``X-Forwarded-For`` disagree, the proxies have set one of them and the client
        the other: neither counts.
        """
        if not self._networks or not self._is_trusted(peer):
            return peer, None
        plain, standard = _plain(headers), _standard(headers)
        if plain and standard and plain[-1] != standard[-1]:
            return peer, None
        client, scheme = peer, None
        for hop, hop_scheme in reversed(plain or standard):
            if _address(hop) is None:
                break
            client, scheme = hop, hop_scheme or scheme
            if not self._is_trusted(hop):
                break
        return client, scheme

    def _is_trusted(self, text: str) -> bool:
        address = _address(text)
        return address is not None and any(address in network for network in self._networks)


def _plain(headers: Mapping[bytes, bytes]) -> list[tuple[str, str | None]]:
    """X-Forwarded-For, with X-Forwarded-Proto."""
    addresses = _listed(headers.get(b"x-forwarded-for", b""))
    given = _listed(headers.get(b"x-forwarded-proto", b""))
    schemes: list[str | None] = [scheme if scheme in ("http", "https") else None for scheme in given]
    if len(schemes) != len(addresses):
        schemes = [schemes[-1] if schemes else None] * len(addresses)
    return [(_bare(address), scheme) for address, scheme in zip(addresses, schemes, strict=True)]


def _standard(headers: Mapping[bytes, bytes]) -> list[tuple[str, str | None]]:
    """Forwarded (RFC 7239)."""
    hops = []
    for element in _listed(headers.get(b"forwarded", b"")):
        pairs = {
            found[1].lower(): found[2] for part in element.split(";") if (found := _PAIR.fullmatch(part))
        }
        scheme = pairs.get("proto", "").lower()
        hops.append((_bare(pairs.get("for", "")), scheme if scheme in ("http", "https") else None))
    return hops


def _listed(value: bytes) -> list[str]:
    return [part.strip() for part in value.decode("latin-1").split(",") if part.strip()]


def _bare(text: str) -> str:
    """Without the port."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


def _address(text: str) -> Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
