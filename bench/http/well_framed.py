"""Requests of any content that are well framed: each gets its answer, and the connection lives on."""

from __future__ import annotations

import json

from .hostile_parts import DEPTH, ENDPOINTS, FIELDS, PATHS, UPGRADES, Attempt, RequestParts


class WellFramed(RequestParts):
    """One method for each kind."""

    def valid(self) -> Attempt:
        return Attempt("valid", (self.request(*self.body()),))

    def other_fields(self) -> Attempt:
        path, body = self.body()
        for _ in range(self._random.choice((1, 1, 1, 2, 5))):
            body[self._random.choice(FIELDS)] = self.value()
        return Attempt(
            "other fields",
            (self.request(self._random.choice((path, path, path, "/tokenize", "/v1/batches")), body),),
        )

    def other_json(self) -> Attempt:
        text = json.dumps(self.body()[1]).encode()
        at = self._random.randrange(len(text))
        insert = self._random.choice(
            (b"\xff", b"\\ud800", b"{", b"[[", b'"', b"NaN", b"1e999", b",", b"\x00", b"-", b"\\u0000", b"")
        )
        body = self._random.choice(
            (
                text[:at] + insert + text[at + self._random.randrange(4) :],
                text[:at],
                b"",
                b"null",
                b"[]",
                b'"x"',
            )
        )
        return Attempt("other JSON", (self.request(self._random.choice(ENDPOINTS), body),))

    def other_page(self) -> Attempt:
        method = self._random.choice(("GET", "GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))
        path = self._random.choice((*PATHS, *ENDPOINTS)) + self._random.choice(
            ("", "", "?a=b", "?limit=-1&after=%zz", "#x", "?" + "a" * 3000)
        )
        body = self._random.choice(
            (b"", b"{}", b'{"prompt": "Hi"}', b'{"tokens": [1, 99999999]}', self._random.randbytes(30))
        )
        return Attempt(
            "other page",
            (
                self.request(
                    path,
                    body,
                    method,
                    extra=self._random.choice(("", "content-type: multipart/form-data\r\n")),
                ),
            ),
        )

    def pipelined(self) -> Attempt:
        count = self._random.randrange(2, 20)
        requests = [
            self.request(*self.body()) if self._random.random() < 0.2 else self.request("/health", b"", "GET")
            for _ in range(count)
        ]
        return Attempt("pipelined", (b"".join(requests),), count)

    def deep(self) -> Attempt:
        opening, closing = self._random.choice((("[", "]"), ('{"a":', "}"), ('[{"x":[', "")))
        deep = opening * DEPTH + "1" + closing * DEPTH
        return Attempt(
            "deep JSON",
            (
                self.request(
                    self._random.choice(ENDPOINTS), f'{{"messages": {deep}, "prompt": {deep}}}'.encode()
                ),
            ),
        )

    def slow(self) -> Attempt:
        request = self.request(*self.body())
        cuts = sorted(self._random.sample(range(1, len(request)), 12))
        pieces = tuple(request[a:b] for a, b in zip((0, *cuts), (*cuts, len(request)), strict=True))
        return Attempt("slow", pieces)

    def wrong_key(self) -> Attempt:
        value = self._random.choice(
            ("", "Bearer", "Bearer x", f"Basic {self._key}", f"Bearer {self._key}x", "Bearer " + "k" * 5000)
        )
        return Attempt(
            "wrong key", (self.request(*self.body(), extra=f"authorization: {value}\r\n", key=""),)
        )

    def upgrade(self) -> Attempt:
        """On an ordinary request, which is answered as if it were not there; the next request on the
        connection, too."""
        path, body = self.body()
        connection = self._random.choice(("Upgrade", "upgrade, HTTP2-Settings", "keep-alive, Upgrade"))
        extra = f"connection: {connection}\r\nupgrade: {self._random.choice(UPGRADES)}\r\n"
        request = self.request(path, body, extra=extra) + self.request("/health", b"", "GET")
        cut = self._random.choice(
            (len(request), request.index(b"\r\n\r\n") + 4, self._random.randrange(1, len(request)))
        )
        return Attempt("upgrade", tuple(piece for piece in (request[:cut], request[cut:]) if piece), 2)
