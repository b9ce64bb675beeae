"""Requests that are badly framed, or not ended: the connection is over afterwards."""

from __future__ import annotations

import base64
import json
import struct

from .hostile_parts import (
    CONTENT_TYPES,
    ENDPOINTS,
    HOSTS,
    HUGE_HEADER,
    JSON_TO,
    ORIGINS,
    PATHS,
    Attempt,
    RequestParts,
)


class BadlyFramed(RequestParts):
    """One method for each kind."""

    def huge_headers(self) -> Attempt:
        header = self._random.choice(
            (
                b"a: " + b"b" * HUGE_HEADER + b"\r\n",
                b"a: b\r\n" * (HUGE_HEADER // 6),
                b"a" * HUGE_HEADER + b": b\r\n",
            )
        )
        return Attempt(
            "huge headers",
            (b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + header + b"\r\n",),
            ending=self.over(),
        )

    def other_heads(self) -> Attempt:
        """Any host, origin, content type and forwarded headers, in any combination."""
        lines = []
        for share, header, values in (
            (0.7, "host", HOSTS),
            (0.5, "origin", ORIGINS),
            (0.7, "content-type", CONTENT_TYPES),
            (0.3, "access-control-request-method", ("POST", "", "x" * 999)),
        ):
            if self._random.random() < share:
                lines.append(f"{header}: {self._random.choice(values)}")
        if self._random.random() < 0.3:
            lines += [f"x-forwarded-for: {self._random.choice(HOSTS)}", "forwarded: for=x;;=,"]
        method = self._random.choice(("POST", "POST", "GET", "OPTIONS", "DELETE", "PUT", "CONNECT"))
        path, body = self.body()
        path = self._random.choice((path, path, *PATHS))
        request = self.request(path, body, method, to="".join(f"{line}\r\n" for line in lines))
        return Attempt("other heads", (request,), ending=self.over())

    def long_extensions(self) -> Attempt:
        head = (
            f"POST {self._random.choice(ENDPOINTS)} "
            f"HTTP/1.1\r\n{JSON_TO}{self.authorization()}transfer-encoding: chunked\r\n\r\n5;"
        )
        pieces = (head.encode(), *([b"x" * 100_000] * self._random.randrange(1, 8)))
        return Attempt("long chunk extensions", pieces, ending=self.over())

    def changed(self) -> Attempt:
        request = bytearray(self.request(*self.body()))
        for _ in range(self._random.choice((1, 1, 2, 8))):
            at = self._random.randrange(len(request))
            match self._random.randrange(4):
                case 0:
                    request[at] = self._random.randrange(256)
                case 1:
                    request[at : at + self._random.randrange(8)] = b""
                case 2:
                    request[at:at] = self._random.randbytes(self._random.randrange(8))
                case _:
                    request[at:at] = request[at : at + self._random.randrange(64)]
        return Attempt("changed bytes", (bytes(request),), ending=self.over())

    def cut(self) -> Attempt:
        request = self.request(*self.body())
        return Attempt("cut short", (request[: self._random.randrange(len(request))],), ending=self.over())

    def noise(self) -> Attempt:
        begin = self._random.choice(
            (
                b"",
                b"GET ",
                b"POST / HTTP/1.1\r\n",
                b"\r\n\r\n",
                b"\x16\x03\x01\x02",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            )
        )
        return Attempt(
            "noise", (begin + self._random.randbytes(self._random.randrange(1, 300)),), ending=self.over()
        )

    def wrong_length(self) -> Attempt:
        content = json.dumps(self.body()[1]).encode()
        length = self._random.choice(
            (len(content) - 9, len(content) + 9, -1, 0, 1 << 40, 1 << 70, "abc", "1 2", "+5", "0x10", "")
        )
        twice = self._random.choice(("", "", "content-length: 5\r\n", "transfer-encoding: chunked\r\n"))
        head = (
            f"POST {self._random.choice(ENDPOINTS)} "
            f"HTTP/1.1\r\n{JSON_TO}{self.authorization()}content-length: {length}\r\n{twice}\r\n"
        )
        return Attempt("wrong length", (head.encode() + content,), ending=self.over())

    def bad_chunks(self) -> Attempt:
        content = json.dumps(self.body()[1]).encode()
        size = self._random.choice(
            (
                f"{len(content):x}",
                "zz",
                "-1",
                "f" * 20,
                f"{len(content) + 5:x}",
                f"{len(content) - 5:x}",
                "",
                "5;" + "x" * 500,
            )
        )
        tail = self._random.choice(
            (b"\r\n0\r\n\r\n", b"", b"0\r\n", b"\r\n0\r\na: b\r\n\r\n", b"\r\n0\r\n" + b"t: x\r\n" * 50)
        )
        head = (
            f"POST {self._random.choice(ENDPOINTS)} "
            f"HTTP/1.1\r\n{JSON_TO}{self.authorization()}transfer-encoding: chunked\r\n\r\n"
        )
        return Attempt(
            "bad chunks", (head.encode() + size.encode() + b"\r\n" + content + tail,), ending=self.over()
        )

    def websocket(self) -> Attempt:
        key = base64.b64encode(self._random.randbytes(16)).decode()
        upgrade = (
            "upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-version: "
            f"13\r\nsec-websocket-key: {key}\r\n"
        )
        head = f"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\n{self.authorization()}{upgrade}\r\n".encode()
        frames = b"".join(self._frame() for _ in range(self._random.randrange(4)))
        return Attempt("WebSocket", (head, frames) if frames else (head,), ending=self.over())

    def _frame(self) -> bytes:
        message = {
            "id": "a",
            "body": self.body()[1],
            self._random.choice(("x", "id", "cancel", "endpoint")): self.value(),
        }
        content = self._random.choice(
            (json.dumps(message).encode()[: self._random.choice((9, 10_000))], self._random.randbytes(20))
        )
        opcode = self._random.choice((0x81, 0x81, 0x81, 0x82, 0x80, 0x01, 0x89, 0x88, 0xFF))
        mask = self._random.randbytes(4)
        length = (
            bytes([0x80 | len(content)]) if len(content) < 126 else b"\xfe" + struct.pack(">H", len(content))
        )
        return bytes([opcode]) + length + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(content))

    def stalled(self) -> Attempt:
        request = self.request(*self.body())
        return Attempt("stalled", (request[: self._random.randrange(1, len(request))],), ending="stall")
