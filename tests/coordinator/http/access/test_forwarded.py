"""Which proxies' headers decide a client's address and scheme."""

from __future__ import annotations

import pytest

from splitserve.coordinator.http.access.forwarded import TrustedProxies

PROXIES = TrustedProxies(["10.0.0.0/8", "fd00::1"])


@pytest.mark.parametrize(
    ("peer", "headers", "client"),
    [
        (
            "192.0.2.1",
            {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"},
            ("192.0.2.1", None),
        ),  # by an untrusted client
        ("10.0.0.1", {}, ("10.0.0.1", None)),
        ("10.0.0.1", {"x-forwarded-for": "203.0.113.9"}, ("203.0.113.9", None)),
        (
            "10.0.0.1",
            {"x-forwarded-for": "203.0.113.9:4711", "x-forwarded-proto": "https"},
            ("203.0.113.9", "https"),
        ),
        ("::ffff:10.0.0.1", {"x-forwarded-for": "203.0.113.9"}, ("203.0.113.9", None)),
        ("fd00::1", {"x-forwarded-for": "[2001:db8::7]:99"}, ("2001:db8::7", None)),
        (
            "10.0.0.1",
            {"x-forwarded-for": "127.0.0.1, 203.0.113.9, 10.0.0.2"},
            ("203.0.113.9", None),
        ),  # what the client made up is left out
        ("10.0.0.1", {"x-forwarded-for": "10.0.0.3, 10.0.0.2"}, ("10.0.0.3", None)),
        ("10.0.0.1", {"x-forwarded-for": "rubbish, 10.0.0.2"}, ("10.0.0.2", None)),
        (
            "10.0.0.1",
            {"forwarded": 'for=127.0.0.1;proto=http, for="[2001:db8::7]:99";proto=https;by=x'},
            ("2001:db8::7", "https"),
        ),
        ("10.0.0.1", {"forwarded": "for=unknown"}, ("10.0.0.1", None)),
        ("10.0.0.1", {"forwarded": "for=_hidden;proto=ftp"}, ("10.0.0.1", None)),
        (
            "10.0.0.1",
            {"forwarded": "for=198.51.100.1", "x-forwarded-for": "203.0.113.9"},
            ("10.0.0.1", None),
        ),  # one is the client's
        (
            "10.0.0.1",
            {"forwarded": "for=203.0.113.9", "x-forwarded-for": "203.0.113.9"},
            ("203.0.113.9", None),
        ),
    ],
)
def test_the_clients_address(peer: str, headers: dict[str, str], client: tuple[str, str | None]) -> None:
    raw = {name.encode(): value.encode() for name, value in headers.items()}
    assert PROXIES.client_of(peer, raw) == client
    assert TrustedProxies().client_of(peer, raw) == (peer, None)
