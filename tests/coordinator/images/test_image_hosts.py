"""Which addresses of images are fetched: by the hosts that are listed, whatever a URL looks like."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from splitserve.coordinator.images.hosts import ImageHosts, is_public
from splitserve.coordinator.settings import CoordinatorSettings

LISTED = ["good.com", "*.cdn.good.com", "odd.com:8080", "+inner", "192.0.2.7", "[::1]:9000", "bücher.example"]


def allows(url: str, listed: list[str] = LISTED) -> bool:
    try:
        ImageHosts(listed).check(httpx.URL(url))
    except (ValueError, httpx.InvalidURL):
        return False
    return True


@pytest.mark.parametrize(
    "url",
    [
        "http://good.com/a.png",
        "HTTPS://GOOD.COM:443/",
        "http://good.com:0080/a?b#c",
        "https://a.b.cdn.good.com/",
        "http://odd.com:8080/",
        "http://inner/",
        "http://192.0.2.7/",
        "http://[0:0::1]:9000/",
        "http://bücher.example/",
        "http://xn--bcher-kva.example/",
    ],
)
def test_listed_hosts(url: str) -> None:
    assert allows(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://www.good.com/",
        "http://cdn.good.com/",
        "http://evilcdn.good.com/",
        "http://good.com./",
        "http://good.com.evil.com/",
        "http://good.com:8080/",
        "http://odd.com/",
        "http://user@good.com/",
        "http://good.com@evil.com/",
        "http://good.com\\@evil.com/",
        "http://evil.com\\.cdn.good.com/",
        "http://evil.com#.cdn.good.com/",
        "http://evil.com%2f.cdn.good.com/",
        "http://%67ood.com/",
        "http://go\tod.com/",
        "http://good.com\n.evil.com/",
        "http:///good.com/",
        "//good.com/",
        "ftp://good.com/",
        "file://good.com/etc/passwd",
        "gopher://good.com:80/",
        "http://192.0.2.8/",
        "http://3221225991/",  # 192.0.2.7
        "http://0xc0.0.2.7/",
        "http://[::ffff:192.0.2.7]/",
        "http://[::1]/",
        "http://[::1%25lo]:9000/",
        "http://..cdn.good.com/",
        "http://-.cdn.good.com/",
    ],
)
def test_others(url: str) -> None:
    assert not allows(url)


HOSTILE = st.text("go.dcmeviln:@/\\?#%[]0127x-+*\t \u3002\uff0f\u00ad\u212a", max_size=30)


@given(before=HOSTILE, after=HOSTILE)
@example(before="good.com\\", after="")
def test_no_url_reaches_another_host(before: str, after: str) -> None:
    """What the check allows is what an HTTP request of the same object would connect to and ask for."""
    try:
        url = httpx.URL(f"http://{before}good.com{after}")
        ImageHosts(["good.com", "*.good.com"]).check(url)
    except (ValueError, httpx.InvalidURL):
        return
    request = httpx.Request("GET", url)
    assert request.url.host == "good.com" or request.url.host.endswith(".good.com")
    assert request.headers["host"].removesuffix(":443") == request.url.host
    moved = url.copy_with(host="192.0.2.1")
    assert (moved.host, moved.raw_path, moved.userinfo) == ("192.0.2.1", url.raw_path, b"")


@pytest.mark.parametrize(
    "entry",
    ["*", "+", "http://a.com", "a.com/a", "u@a.com", "a.com:x", "*.192.0.2.1", "a b", "a/8", "[::1%25lo]"],
)
def test_an_entry_that_is_no_host(entry: str) -> None:
    with pytest.raises(ValueError, match=r"--image-domains: .* is no host"):
        CoordinatorSettings(model="m", insecure=True, image_domains=f"good.com,{entry}")


def test_none_are_listed_unless_an_operator_does() -> None:
    assert CoordinatorSettings(model="m", insecure=True).image_hosts is None
    listed = ",".join(LISTED)
    assert CoordinatorSettings(model="m", insecure=True, image_domains=listed).image_hosts is not None


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.100.100.200", "0.0.0.0",
        "224.0.0.1", "255.255.255.255", "168.63.129.16", "::", "::1", "fe80::1", "fe80::1%eth0",
        "fd00:ec2::254", "::ffff:8.8.8.8", "::8.8.8.8", "64:ff9b::808:808", "64:ff9b:1::1", "2002:808:808::1",
        "2001:0:1::1", "2001:db8::1", "ff02::1", "fec0::1",
    ],
)  # fmt: skip
def test_addresses_of_no_public_host(address: str) -> None:
    assert not is_public(address)


@given(st.ip_addresses())
@example(IPv6Address("2606:4700::1111"))
def test_public_addresses(address: IPv4Address | IPv6Address) -> None:
    private = address.is_private or address.is_multicast or address.is_reserved or address.is_link_local
    assert not (private and is_public(str(address)))
    assert is_public("8.8.8.8")
    assert is_public("2606:4700::1111")


@pytest.mark.parametrize("entry", ["a.com:0", "a.com:65536"])
def test_an_entry_without_a_possible_port(entry: str) -> None:
    with pytest.raises(ValueError, match=f"--image-domains: '{entry}' has no port from 1 to 65535"):
        CoordinatorSettings(model="m", insecure=True, image_domains=entry)
