"""Fetching images: which connections are made, and what clients see when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from support.certificates import write_certificate
from support.image_host import NEVER, ImageHost, answer, image_host, redirect

from splitserve.coordinator.errors import ApiError, Overloaded
from splitserve.coordinator.http.body import ClientGone
from splitserve.coordinator.http.call import Call
from splitserve.coordinator.http.overload import Overload, OverloadLimits
from splitserve.coordinator.images import fetching
from splitserve.coordinator.images.fetching import ImageFetcher
from splitserve.coordinator.images.hosts import ImageHosts

PATH = "messages[0].content[1].image_url"
FILE = b"pixels"


class Names:
    """A played resolver: each name has a list of answers, the last one for good."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = answers

    async def __call__(self, name: str, port: int) -> Sequence[str]:
        if name[0].isdigit():
            return [name]
        if (found := self.answers.get(name.partition(".")[0])) is None:
            raise OSError("unknown")
        return found.pop(0) if len(found) > 1 else found[0]


class PlayedCall:
    gone = False
    responder: Any = None


def fetcher_for(host: ImageHost, names: Names | None = None, most: int = 1000) -> ImageFetcher:
    listed = [f"+inner.test:{host.port}", f"outer.test:{host.port}", f"127.0.0.1:{host.port}", "*.test"]
    overload = Overload(OverloadLimits(max_held_bytes=1000))
    return ImageFetcher(ImageHosts(listed), most, overload, names or Names(inner=[["127.0.0.1"]]))


async def fetch(fetcher: ImageFetcher, *urls: str, call: PlayedCall | None = None) -> dict[str, bytes]:
    called = cast(Call, call or PlayedCall())
    async with fetcher.fetched([(PATH, url) for url in urls], called) as found:
        assert called.responder is None
        held = fetcher._overload.used["image_bytes"]
        assert held == sum(map(len, found.values()))
    assert fetcher._overload.used["image_bytes"] == 0
    return found


async def refusal(fetcher: ImageFetcher, url: str) -> str:
    with pytest.raises(ApiError) as refused:
        await fetch(fetcher, url)
    assert refused.value.status == 400
    assert fetcher._overload.used["image_bytes"] == 0
    start = f"{PATH}: {url} "
    assert refused.value.message.startswith(start)
    return refused.value.message.removeprefix(start)


async def test_files_by_name_and_by_address() -> None:
    async with image_host({"/a": answer(FILE), "/b": answer(b"other")}) as host:
        a, b = host.url("/a", "inner.test"), host.url("/b")
        assert await fetch(fetcher_for(host), a, b, a) == {a: FILE, b: b"other"}
        assert sorted(host.paths) == ["/a", "/b"]
        (head,) = [head for head in host.heads if head.startswith("get /a")]
        assert f"host: inner.test:{host.port}\r\n" in head
        assert "accept-encoding: identity" in head
        assert "cookie" not in head
        assert "authorization" not in head


@pytest.mark.parametrize(
    ("page", "clause"),
    [
        (answer(b"secret", "404 Not Found"), "answered 404"),
        (answer(b"secret", "204 No Content"), "answered 204"),
        (answer(b"x" * 1001), "is too large: images may have 1,000 bytes in a request"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001, "is too large: images may have 1,000 bytes in a request"),
        (answer(FILE, "200 OK", "content-encoding: gzip"), "answered with compressed data"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", "broke off"),
        (b"SSH-2.0\r\n\r\n", "did not answer as a web server does"),
        (redirect("/loop"), "redirects more than 3 times"),
        (redirect("http://169.254.169.254/"), "redirects to an address that is not allowed"),
        (redirect("http://localhost/"), "redirects to an address that is not allowed"),
        (redirect("file:///etc/passwd"), "redirects to an address that is not allowed"),
        (redirect("http://[/"), "redirects to an address that is not allowed"),
        (redirect("http://u:p@127.0.0.1/"), "redirects to an address that is not allowed"),
    ],
)  # fmt: skip
async def test_what_a_host_may_answer(page: bytes, clause: str) -> None:
    async with image_host({"/loop": page}) as host:
        found = await refusal(fetcher_for(host), host.url("/loop"))
        assert found.startswith(clause)
        assert "secret" not in found
        assert len(host.heads) == (4 if "more than" in clause else 1)


async def test_a_redirect_is_checked_and_followed_without_its_cookie() -> None:
    async with image_host({"/a": answer(FILE)}) as host:
        host.pages["/b"] = redirect(host.url("/a", "inner.test"))
        url = host.url("/b")
        assert await fetch(fetcher_for(host), url) == {url: FILE}
        assert host.paths == ["/b", "/a"]
        assert not any("cookie" in head for head in host.heads)
        host.pages["/b"] = redirect(host.url("/a", "outer.test"))
        names = Names(outer=[["127.0.0.1"]])
        assert await refusal(fetcher_for(host, names), url) == "has a host without a public address"


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("others", [[], ["8.8.8.8"]])
async def test_a_listed_name_of_a_private_address(address: str, others: list[str]) -> None:
    async with image_host({"/a": answer(FILE)}) as host:
        fetcher = fetcher_for(host, Names(outer=[[*others, address]]))
        url = host.url("/a", "outer.test")
        assert await refusal(fetcher, url) == "has a host without a public address"
        assert not host.heads


async def test_the_address_that_was_checked_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name changes after the check: it is not looked up again. No server is at the first address."""
    monkeypatch.setattr(fetching, "CONNECT_S", 0.05)
    async with image_host({"/a": answer(FILE)}) as host:
        names = Names(outer=[["192.0.0.9"], ["127.0.0.1"]])  # a public address, of a protocol
        url = host.url("/a", "outer.test")
        assert await refusal(fetcher_for(host, names), url) == "cannot be reached, or not securely"
        assert names.answers["outer"] == [["127.0.0.1"]]
        assert not host.heads


async def test_a_name_that_nobody_knows() -> None:
    async with image_host({}) as host:
        assert await refusal(fetcher_for(host), "http://a.test/") == "has a host whose name is not known"


async def test_tls_is_verified_against_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = write_certificate(tmp_path, "inner.test")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with image_host({"/a": answer(FILE)}, (certificate, key)) as host:
        url = host.url("/a", "inner.test", "https")
        assert await fetch(fetcher_for(host), url) == {url: FILE}
        other = host.url("/a", scheme="https")  # the certificate is not of the address
        assert await refusal(fetcher_for(host), other) == "cannot be reached, or not securely"


async def test_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "TIMEOUT_S", 0.05)
    async with image_host({"/never": NEVER}) as host:
        url = host.url("/never")
        assert await refusal(fetcher_for(host), url) == "was not fetched within 0.05 s"
        await host.left.wait()


async def test_a_client_that_goes_takes_its_fetches_along() -> None:
    async with image_host({"/never": NEVER}) as host:
        call = PlayedCall()
        waiting = asyncio.ensure_future(fetch(fetcher_for(host), host.url("/never"), call=call))
        while not host.heads:
            await asyncio.sleep(0)
        call.gone = True
        call.responder.client_gone()
        with pytest.raises(ClientGone):
            await waiting
        await host.left.wait()
        assert call.responder is None


async def test_bounds_of_all_requests_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async with image_host({"/a": answer(b"x" * 900), "/never": NEVER}) as host:
        fetcher = fetcher_for(host)
        async with fetcher.fetched([(PATH, host.url("/a"))], cast(Call, PlayedCall())):
            with pytest.raises(Overloaded):
                await fetch(fetcher, host.url("/a"))
        monkeypatch.setattr(fetching, "TIMEOUT_S", 0.1)
        fetcher._slots = asyncio.Semaphore(0)
        with pytest.raises(Overloaded):
            await fetch(fetcher, host.url("/a"))
        assert host.paths == ["/a", "/a"]


async def test_one_request_leaves_room_for_others() -> None:
    pages = {f"/{i}": NEVER for i in range(20)}
    async with image_host(pages) as host:
        fetcher = fetcher_for(host)
        many = asyncio.ensure_future(fetch(fetcher, *map(host.url, pages)))
        while len(host.heads) < fetching.MAX_OF_REQUEST:
            await asyncio.sleep(0)
        host.pages["/a"] = answer(FILE)
        assert len(await fetch(fetcher, host.url("/a"))) == 1
        assert len(host.heads) == fetching.MAX_OF_REQUEST + 1
        many.cancel()
        await asyncio.gather(many, return_exceptions=True)


async def test_tiny_pieces_leave_turns_to_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may send thousands of chunks of one byte, which arrive together."""
    page = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 900 + b"0\r\n\r\n"
    num_turns = [0, 0]
    for place, pieces in enumerate((10_000, 1)):
        monkeypatch.setattr(fetching, "PIECES_A_TURN", pieces)
        async with image_host({"/a": page}) as host:
            running = asyncio.ensure_future(fetch(fetcher_for(host), url := host.url("/a")))
            while not running.done():
                num_turns[place] += 1
                await asyncio.sleep(0)
            assert await running == {url: b"x" * 900}
    assert num_turns[1] > num_turns[0] + 500, num_turns
