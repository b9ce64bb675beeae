"""Fetches the images that chats name by http or https address.

A client chooses the address, and the server stands where the client does not: so only listed hosts are asked,
at the very IP address that was checked, without cookies, credentials or proxies. Neither what a host answers
nor where its name leads is shown to clients.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from ..errors import ApiError, DeadlineExceeded, Overloaded, WrongField
from ..http.body import ClientGone
from ..http.call import Call
from ..http.overload import Overload
from .hosts import ImageHosts, is_public, port_of
from .resolving import Resolver

TIMEOUT_S = 10.0
"""Bound of all images of a request together."""
CONNECT_S = 3.0
"""Bound of connecting to one IP address of a host; then the next is tried."""
MAX_ADDRESSES = 3
MAX_REDIRECTS = 3
MAX_AT_ONCE = 32
MAX_OF_REQUEST = 8
"""Bound of one request, which leaves room for others."""
PIECES_A_TURN = 64
"""Pieces of an answer that are read before streams are served again: 1 to 2 ms."""
MAX_SHOWN_CHARS = 200
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = {"user-agent": "splitserve", "accept": "image/*", "accept-encoding": "identity"}
TOO_SLOW = "The request did not end within its {:g} s: its images were being fetched; allow more time."
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host's name. Raises OSError."""
Wanted = Sequence[tuple[str, str]]
"""Paths of parts of a body, with the addresses they name."""


class ImageFetcher:
    """One for each process."""

    def __init__(
        self, hosts: ImageHosts, max_bytes: int, overload: Overload, resolve: Resolve | None = None
    ) -> None:
        """``max_bytes``: of all images of a request."""
        self._hosts, self._max_bytes, self._overload = hosts, max_bytes, overload
        self._resolve = resolve or Resolver()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        # below httpx's client: that one keeps cookies, follows redirects and reads the environment
        self._transport = httpx.AsyncHTTPTransport(
            verify=httpx.create_ssl_context(),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    @asynccontextmanager
    async def fetched(
        self, wanted: Wanted, call: Call, timeout_s: float = math.inf
    ) -> AsyncIterator[dict[str, bytes]]:
        """Yield the files by their addresses; their memory counts until the end. ``timeout_s``: of the
        request. Raises WrongField, Overloaded, DeadlineExceeded or ClientGone."""
        request = _Request(self._max_bytes, self._overload)
        try:
            if call.gone:
                raise ClientGone
            paths = {url: path for path, url in reversed(wanted)}
            fetching = asyncio.ensure_future(self._all(request, paths, timeout_s))
            call.responder = _Cancels(fetching)
            try:
                files = await fetching
            except asyncio.CancelledError:
                if call.gone:
                    raise ClientGone from None
                raise
            finally:
                call.responder = None
            yield files
        finally:
            request.close()

    async def _all(self, request: _Request, paths: dict[str, str], timeout_s: float) -> dict[str, bytes]:
        parsed = {url: self._checked(url, path) for url, path in paths.items()}
        own = asyncio.Semaphore(MAX_OF_REQUEST)

        async def one(url: str) -> bytes:
            async with own, self._slots:
                request.waiting.discard(url)
                try:
                    return await self._file(parsed[url], request)
                except ValueError as error:
                    raise _refusal(url, paths[url], error) from error

        request.waiting = set(paths)
        tasks = {url: asyncio.ensure_future(one(url)) for url in paths}
        try:
            async with asyncio.timeout(min(TIMEOUT_S, timeout_s)):
                return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        except TimeoutError as error:
            if timeout_s <= TIMEOUT_S:
                raise DeadlineExceeded(TOO_SLOW.format(timeout_s)) from error
            if len(request.waiting) == len(paths):
                raise too_many() from error
            late = [url for url, task in tasks.items() if task.cancelled()] or [*tasks]
            raise _refusal(late[0], paths[late[0]], f"was not fetched within {TIMEOUT_S:g} s") from error
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _checked(self, url: str, path: str) -> httpx.URL:
        """Return the address as it is checked and fetched, parsed once. Raises WrongField."""
        try:
            parsed = httpx.URL(url)
            self._hosts.check(parsed)
        except httpx.InvalidURL as error:
            raise _refusal(url, path, "is no valid address") from error
        except ValueError as error:
            raise _refusal(url, path, error) from error
        return parsed

    async def _file(self, url: httpx.URL, request: _Request) -> bytes:
        """Raises ValueError with a clause about the address."""
        for _ in range(1 + MAX_REDIRECTS):
            response = await self._answer(url)
            try:
                if response.status_code not in REDIRECTS:
                    return await request.body_of(response)
                url = self._next(url, response.headers.get("location", ""))
            except httpx.HTTPError as error:
                raise ValueError("broke off") from error
            finally:
                await response.aclose()
        raise ValueError(f"redirects more than {MAX_REDIRECTS} times")

    def _next(self, url: httpx.URL, location: str) -> httpx.URL:
        try:
            url = url.join(location)
            self._hosts.check(url)
        except (httpx.InvalidURL, ValueError) as error:
            raise ValueError("redirects to an address that is not allowed") from error
        return url

    async def _answer(self, url: httpx.URL) -> httpx.Response:
        """Ask a host by an IP address that was checked. Raises ValueError."""
        name = url.raw_host.decode("ascii")
        for address in (await self._addresses(url))[:MAX_ADDRESSES]:
            request = httpx.Request(
                "GET",
                url.copy_with(host=address),
                headers={"host": url.netloc.decode("ascii"), **HEADERS},
                extensions={"sni_hostname": name, "timeout": {"connect": CONNECT_S}},
            )
            assert request.url.host == address
            try:
                return await self._transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
            except httpx.HTTPError as error:
                raise ValueError("did not answer as a web server does") from error
        raise ValueError("cannot be reached, or not securely")

    async def _addresses(self, url: httpx.URL) -> Sequence[str]:
        entry = self._hosts.check(url)
        try:
            found = await self._resolve(url.raw_host.decode("ascii"), port_of(url))
        except (OSError, UnicodeError) as error:
            raise ValueError("has a host whose name is not known") from error
        if not entry.may_be_private and not all(map(is_public, found)):
            raise ValueError("has a host without a public address")
        return found


class _Cancels:
    """A call's ``Responder`` while its images are fetched."""

    def __init__(self, fetching: asyncio.Future[Any]) -> None:
        self._fetching = fetching

    def client_gone(self, *, too_slow: bool = False) -> None:
        """Give them up."""
        self._fetching.cancel()


class _Request:
    """What the images of one request take."""

    def __init__(self, max_bytes: int, overload: Overload) -> None:
        self.waiting = set[str]()  # for a slot
        self._max_bytes, self._overload, self._held = max_bytes, overload, 0

    async def body_of(self, response: httpx.Response) -> bytes:
        """Raises ValueError; Overloaded if all requests' images together take too much memory."""
        if response.status_code != 200:
            raise ValueError(f"answered {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ValueError("answered with compressed data, which was not asked for")
        data = bytearray()
        num_pieces = 0
        async for piece in response.aiter_raw():
            num_pieces += 1
            if num_pieces % PIECES_A_TURN == 0:  # thousands of tiny ones may be here already
                await asyncio.sleep(0)
            if self._held + len(piece) > self._max_bytes:
                raise ValueError(f"is too large: images may have {self._max_bytes:,} bytes in a request")
            if not self._overload.take("image_bytes", len(piece)):
                raise too_many()
            self._held += len(piece)
            data += piece
        return bytes(data)

    def close(self) -> None:
        self._overload.give_back("image_bytes", self._held)
        self._held = 0


def too_many() -> Overloaded:
    return Overloaded("Too many images are being fetched; try again soon.", retry_after_s=1)


def _refusal(url: str, path: str, fault: object) -> ApiError:
    shown = url if len(url) <= MAX_SHOWN_CHARS else f"{url[:MAX_SHOWN_CHARS]}..."
    return WrongField(path, f"{shown} {fault}")
