"""A web server of images on loopback, which answers by its pages and keeps what it was asked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

NEVER = b""
"""A page that is never answered."""


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """Return a whole response."""
    head = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def redirect(location: str) -> bytes:
    return answer(b"", "302 Found", f"location: {location}", "set-cookie: a=b")


@dataclass
class ImageHost:
    """``pages``: whole responses by path; others are 404."""

    pages: dict[str, bytes]
    port: int = 0
    heads: list[str] = field(default_factory=list)  # of requests, in lower case
    left: asyncio.Event = field(default_factory=asyncio.Event)  # a client of a page that is NEVER answered

    @property
    def paths(self) -> list[str]:
        return [head.split()[1] for head in self.heads]

    def url(self, path: str, name: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{name}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError):  # the client has given up
            writer.close()
            return
        self.heads.append(head.lower())
        page = self.pages.get(head.split()[1], answer(b"secret", "404 Not Found"))
        writer.write(page)
        if page == NEVER:
            await reader.read()
            self.left.set()
        writer.close()


@asynccontextmanager
async def image_host(
    pages: dict[str, bytes], certificate: tuple[Path, Path] | None = None
) -> AsyncIterator[ImageHost]:
    """Run one; with a certificate and its key by TLS."""
    host, tls = ImageHost(pages), None
    if certificate is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*certificate)
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0, ssl=tls)
    host.port = server.sockets[0].getsockname()[1]
    yield host
    server.close()
