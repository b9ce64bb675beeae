"""HTTP requests that a server should survive: valid, changed at random, cut short, wrongly framed, too large,
too deep, too slow.

Pure: what comes follows from the random generator alone.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Ending = Literal["keep", "half_close", "abort", "stall"]
"""What the client does when all is sent: read the answers and go on; close its half; break the connection
off; wait until it is closed."""

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
PATHS = (
    *(
        "/v1/models",
        "/v1/models/bench",
        "/health",
        "/ready",
        "/tokenize",
        "/detokenize",
        "/openapi.json",
        "/v1/files",
        "/v1/batches",
    ),
    *(
        "/v1/files/x",
        "/v1/files/x/content",
        "/v1/batches/x",
        "/v1/batches/x/cancel",
        "/metrics",
        "/debug/state",
        "/",
        "/dashboard/feed",
    ),
    *(
        "/v1/stream",
        "/dashboard/../../etc/passwd",
        "/%00",
        "/v1//models",
        "/v1/models/%ff%fe",
        "/admin/drain/x",
        "/v1/none",
        "*",
        "//x",
    ),
)
FIELDS = (
    *(
        "model",
        "messages",
        "prompt",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "best_of",
        "stop",
        "stop_token_ids",
        "logit_bias",
        "seed",
    ),
    *(
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "ignore_eos",
        "logprobs",
        "top_logprobs",
        "echo",
        "suffix",
        "stream",
        "user",
    ),
    *(
        "stream_options",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
    ),
    *(
        "guided_choice",
        "guided_grammar",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "metadata",
        "service_tier",
        "priority",
    ),
    *(
        "return_token_ids",
        "truncate_prompt_tokens",
        "timeout",
        "reasoning_effort",
        "verbosity",
        "chat_template_kwargs",
        "modalities",
    ),
    *(
        "text",
        "tokens",
        "add_special_tokens",
        "purpose",
        "input_file_id",
        "endpoint",
        "completion_window",
        "no_such_field",
    ),
)
_FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SOME_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        17,
        1 << 31,
        -(1 << 63),
        1 << 64,
        10**400,
        0.5,
        -0.0,
        1e308,
        "",
        "a",
        "json",
        "\x00",
        "\ud800",
    ),
    *(
        "é€😀\u202e",
        "auto",
        [],
        {},
        [[]],
        [1, 2, 3],
        [0, -1],
        ["a", 1],
        {"role": "user", "content": "Hi"},
        {"type": "json_object"},
    ),
    *(
        [{"role": "user", "content": "Hi"}],
        [{"role": "tool", "content": [{"type": "text", "text": "x"}]}],
        {"type": "function"},
    ),
    *(
        {"regex": "(a+)+$"},
        {"json": {"$ref": "#"}},
        {"50": 5},
        {"50": "x"},
        "(",
        "a{1000000}",
        'start: "a"*',
        [[1, 2], [3]],
    ),
    *(
        [{"type": "function", "function": _FUNCTION}],
        {"type": "function", "function": {"name": "f"}},
        "required",
    ),
    *(
        [{"type": "function", "function": {**_FUNCTION, "strict": True}}],
        {"include_obfuscation": True, "include_usage": True},
    ),
    {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    },
    *(
        {"type": "json_schema", "json_schema": {"name": "a", "schema": _FUNCTION["parameters"]}},
        {"choice": ["a", "b"]},
    ),
)
MESSAGES = [{"role": "user", "content": "What does os.path.join do?"}]
JSON_TO = "host: localhost\r\ncontent-type: application/json\r\n"
HOSTS = (
    *(
        "localhost:8000",
        "127.0.0.1",
        "[::1]:80",
        "evil.example",
        "evil.example:80",
        "LOCALHOST.",
        "0x7f.1",
        "1234",
        "a" * 300,
        "[::1",
    ),
    *(
        "",
        " ",
        "a b",
        "a,b",
        "user@localhost",
        "localhost/evil",
        "localhost:x",
        "localhost:999999",
        "\xff",
        "*",
        "localhost\r\nhost: x",
    ),
)
ORIGINS = (
    "null",
    "http://localhost",
    "https://evil.example",
    "http://localhost.evil.example",
    "",
    "x",
    "\xff",
    "http://localhost, http://a",
)
CONTENT_TYPES = (
    *(
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/json; charset=utf-8",
        "",
    ),
    *(
        ";",
        "\xff",
        "application/jsonx",
        "application/json, text/plain",
        "application/json\r\ncontent-type: text/plain",
        "a" * 3000,
    ),
)
UPGRADES = (
    *("h2c", "websocket", "foo", "h2c, websocket", "TLS/1.0, HTTP/1.1", "", "websocket\r\nupgrade: h2c"),
    *("websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",),
)
DEPTH = 20_000
HUGE_HEADER = 80 << 10


@dataclass(frozen=True, slots=True)
class Attempt:
    """One connection's next turn. ``pieces`` are written one after the other; ``num_requests`` of them count.

    ``answers``: number of responses that must come (``keep``); None: none need to.
    """

    kind: str
    pieces: tuple[bytes, ...]
    num_requests: int = 1
    ending: Ending = "keep"


class HostileRequests:
    """An endless source. ``key``: an API key that is good, where one is asked for."""

    def __init__(self, random: Random, key: str = "", stalls: bool = True) -> None:
        self._random, self._key = random, key
        kinds: dict[Callable[[], Attempt], float] = {
            self._valid: 6,
            self._other_fields: 30,
            self._other_json: 14,
            self._other_page: 10,
            self._pipelined: 1.5,
            self._deep: 0.4,
            self._slow: 2,
            self._wrong_key: 3,
            self._huge_headers: 0.5,
            self._changed: 14,
            self._cut: 6,
            self._noise: 3,
            self._wrong_length: 4,
            self._bad_chunks: 3,
            self._websocket: 1,
            self._upgrade: 4,
            self._other_heads: 6,
            self._long_extensions: 0.3,
            self._stalled: 0.02 if stalls else 0,
        }
        self._kinds, self._weights = list(kinds), list(kinds.values())

    def next(self) -> Attempt:
        return self._random.choices(self._kinds, self._weights)[0]()

    # --- well framed: each gets its answer, and the connection lives on -------------------------------

    def _valid(self) -> Attempt:
        return Attempt("valid", (self._request(*self._body()),))

    def _other_fields(self) -> Attempt:
        path, body = self._body()
        for _ in range(self._random.choice((1, 1, 1, 2, 5))):
            body[self._random.choice(FIELDS)] = self._value()
        return Attempt(
            "other fields",
            (self._request(self._random.choice((path, path, path, "/tokenize", "/v1/batches")), body),),
        )

    def _other_json(self) -> Attempt:
        text = json.dumps(self._body()[1]).encode()
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
        return Attempt("other JSON", (self._request(self._random.choice(ENDPOINTS), body),))

    def _other_page(self) -> Attempt:
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
                self._request(
                    path,
                    body,
                    method,
                    extra=self._random.choice(("", "content-type: multipart/form-data\r\n")),
                ),
            ),
        )

    def _pipelined(self) -> Attempt:
        count = self._random.randrange(2, 20)
        requests = [
            self._request(*self._body())
            if self._random.random() < 0.2
            else self._request("/health", b"", "GET")
            for _ in range(count)
        ]
        return Attempt("pipelined", (b"".join(requests),), count)

    def _deep(self) -> Attempt:
        opening, closing = self._random.choice((("[", "]"), ('{"a":', "}"), ('[{"x":[', "")))
        deep = opening * DEPTH + "1" + closing * DEPTH
        return Attempt(
            "deep JSON",
            (
                self._request(
                    self._random.choice(ENDPOINTS), f'{{"messages": {deep}, "prompt": {deep}}}'.encode()
                ),
            ),
        )

    def _slow(self) -> Attempt:
        request = self._request(*self._body())
        cuts = sorted(self._random.sample(range(1, len(request)), 12))
        pieces = tuple(request[a:b] for a, b in zip((0, *cuts), (*cuts, len(request)), strict=True))
        return Attempt("slow", pieces)

    def _wrong_key(self) -> Attempt:
        value = self._random.choice(
            ("", "Bearer", "Bearer x", f"Basic {self._key}", f"Bearer {self._key}x", "Bearer " + "k" * 5000)
        )
        return Attempt(
            "wrong key", (self._request(*self._body(), extra=f"authorization: {value}\r\n", key=""),)
        )

    def _upgrade(self) -> Attempt:
        """On an ordinary request, which is answered as if it were not there; the next request on the
        connection, too."""
        path, body = self._body()
        connection = self._random.choice(("Upgrade", "upgrade, HTTP2-Settings", "keep-alive, Upgrade"))
        extra = f"connection: {connection}\r\nupgrade: {self._random.choice(UPGRADES)}\r\n"
        request = self._request(path, body, extra=extra) + self._request("/health", b"", "GET")
        cut = self._random.choice(
            (len(request), request.index(b"\r\n\r\n") + 4, self._random.randrange(1, len(request)))
        )
        return Attempt("upgrade", tuple(piece for piece in (request[:cut], request[cut:]) if piece), 2)

    # --- badly framed, or not ended: the connection is over afterwards ---------------------------------

    def _huge_headers(self) -> Attempt:
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
            ending=self._over(),
        )

    def _other_heads(self) -> Attempt:
        """Any host, origin, content type and forwarded headers, in any combination."""
        lines = [f"host: {self._random.choice(HOSTS)}"] if self._random.random() < 0.7 else []
        lines += [f"origin: {self._random.choice(ORIGINS)}"] if self._random.random() < 0.5 else []
        lines += (
            [f"content-type: {self._random.choice(CONTENT_TYPES)}"] if self._random.random() < 0.7 else []
        )
        lines += (
            [f"access-control-request-method: {self._random.choice(('POST', '', 'x' * 999))}"]
            if self._random.random() < 0.3
            else []
        )
        lines += (
            [f"x-forwarded-for: {self._random.choice(HOSTS)}", "forwarded: for=x;;=,"]
            if self._random.random() < 0.3
            else []
        )
        method = self._random.choice(("POST", "POST", "GET", "OPTIONS", "DELETE", "PUT", "CONNECT"))
        path, body = self._body()
        path = self._random.choice((path, path, *PATHS))
        request = self._request(path, body, method, to="".join(f"{line}\r\n" for line in lines))
        return Attempt("other heads", (request,), ending=self._over())

    def _long_extensions(self) -> Attempt:
        head = (
            f"POST {self._random.choice(ENDPOINTS)} "
            f"HTTP/1.1\r\n{JSON_TO}{self._authorization()}transfer-encoding: chunked\r\n\r\n5;"
        )
        pieces = (head.encode(), *([b"x" * 100_000] * self._random.randrange(1, 8)))
        return Attempt("long chunk extensions", pieces, ending=self._over())

    def _changed(self) -> Attempt:
        request = bytearray(self._request(*self._body()))
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
        return Attempt("changed bytes", (bytes(request),), ending=self._over())

    def _cut(self) -> Attempt:
        request = self._request(*self._body())
        return Attempt("cut short", (request[: self._random.randrange(len(request))],), ending=self._over())

    def _noise(self) -> Attempt:
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
            "noise", (begin + self._random.randbytes(self._random.randrange(1, 300)),), ending=self._over()
        )

    def _wrong_length(self) -> Attempt:
        content = json.dumps(self._body()[1]).encode()
        length = self._random.choice(
            (len(content) - 9, len(content) + 9, -1, 0, 1 << 40, 1 << 70, "abc", "1 2", "+5", "0x10", "")
        )
        twice = self._random.choice(("", "", "content-length: 5\r\n", "transfer-encoding: chunked\r\n"))
        head = (
            f"POST {self._random.choice(ENDPOINTS)} "
            f"HTTP/1.1\r\n{JSON_TO}{self._authorization()}content-length: {length}\r\n{twice}\r\n"
        )
        return Attempt("wrong length", (head.encode() + content,), ending=self._over())

    def _bad_chunks(self) -> Attempt:
        content = json.dumps(self._body()[1]).encode()
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
            f"HTTP/1.1\r\n{JSON_TO}{self._authorization()}transfer-encoding: chunked\r\n\r\n"
        )
        return Attempt(
            "bad chunks", (head.encode() + size.encode() + b"\r\n" + content + tail,), ending=self._over()
        )

    def _websocket(self) -> Attempt:
        key = base64.b64encode(self._random.randbytes(16)).decode()
        upgrade = (
            "upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-version: "
            f"13\r\nsec-websocket-key: {key}\r\n"
        )
        head = f"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\n{self._authorization()}{upgrade}\r\n".encode()
        frames = b"".join(self._frame() for _ in range(self._random.randrange(4)))
        return Attempt("WebSocket", (head, frames) if frames else (head,), ending=self._over())

    def _frame(self) -> bytes:
        message = {
            "id": "a",
            "body": self._body()[1],
            self._random.choice(("x", "id", "cancel", "endpoint")): self._value(),
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

    def _stalled(self) -> Attempt:
        request = self._request(*self._body())
        return Attempt("stalled", (request[: self._random.randrange(1, len(request))],), ending="stall")

    # --- parts ---------------------------------------------------------------------------------------

    def _over(self) -> Ending:
        return "half_close" if self._random.random() < 0.7 else "abort"

    def _body(self) -> tuple[str, dict[str, Any]]:
        """A good one, that asks for a few tokens."""
        path = self._random.choice(ENDPOINTS)
        body: dict[str, Any] = {"max_tokens": self._random.randrange(1, 5)}
        body |= (
            {"messages": MESSAGES}
            if path == ENDPOINTS[0]
            else {"prompt": self._random.choice(("Hi", [5, 6, 7], ["a", "b"]))}
        )
        if self._random.random() < 0.3:
            body["stream"] = True
        return path, body

    def _value(self) -> Any:
        if self._random.random() < 0.7:
            return self._random.choice(SOME_VALUES)
        if self._random.random() < 0.5:
            return [self._value() for _ in range(self._random.randrange(4))]
        return {self._random.choice(FIELDS): self._value() for _ in range(self._random.randrange(3))}

    def _authorization(self) -> str:
        return f"authorization: Bearer {self._key}\r\n" if self._key else ""

    def _request(
        self,
        path: str,
        body: dict[str, Any] | bytes,
        method: str = "POST",
        *,
        extra: str = "",
        key: str | None = None,
        to: str = JSON_TO,
    ) -> bytes:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        authorization = self._authorization() if key is None else ""
        head = f"{method} {path} HTTP/1.1\r\n{to}{authorization}{extra}content-length: {len(content)}\r\n\r\n"
        return head.encode("latin-1") + content
