"""Parts of HTTP requests that a server should survive: values of every kind, hosts, origins, and whole
requests around them. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Ending = Literal["keep", "half_close", "abort", "stall"]
"""What the client does when all is sent: read the answers and go on; close its half; break the connection
off; wait until it is closed."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
PATHS = (
    "/v1/models", "/v1/models/bench", "/health", "/ready", "/tokenize", "/detokenize", "/openapi.json",
    "/v1/files", "/v1/batches", "/v1/files/x", "/v1/files/x/content", "/v1/batches/x",
    "/v1/batches/x/cancel", "/metrics", "/debug/state", "/", "/dashboard/feed", "/v1/stream",
    "/dashboard/../../etc/passwd", "/%00", "/v1//models", "/v1/models/%ff%fe", "/admin/drain/x", "/v1/none",
    "*", "//x",
)  # fmt: skip
FIELDS = (
    "model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "n", "best_of", "stop",
    "stop_token_ids", "logit_bias", "seed", "max_tokens", "max_completion_tokens", "min_tokens",
    "ignore_eos", "logprobs", "top_logprobs", "echo", "suffix", "stream", "user", "stream_options", "tools",
    "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "metadata", "service_tier", "priority", "return_token_ids",
    "truncate_prompt_tokens", "timeout", "reasoning_effort", "verbosity", "chat_template_kwargs",
    "modalities", "text", "tokens", "add_special_tokens", "purpose", "input_file_id", "endpoint",
    "completion_window", "no_such_field",
)  # fmt: skip
_FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
SOME_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 17, 1 << 31, -(1 << 63), 1 << 64, 10**400, 0.5, -0.0, 1e308, "",
    "a", "json", "\x00", "\ud800", "é€😀\u202e", "auto", [], {}, [[]], [1, 2, 3], [0, -1], ["a", 1],
    {"role": "user", "content": "Hi"}, {"type": "json_object"}, [{"role": "user", "content": "Hi"}],
    [{"role": "tool", "content": [{"type": "text", "text": "x"}]}], {"type": "function"},
    {"regex": "(a+)+$"}, {"json": {"$ref": "#"}}, {"50": 5}, {"50": "x"}, "(", "a{1000000}",
    'start: "a"*', [[1, 2], [3]], [{"type": "function", "function": _FUNCTION}],
    {"type": "function", "function": {"name": "f"}}, "required",
    [{"type": "function", "function": {**_FUNCTION, "strict": True}}],
    {"include_obfuscation": True, "include_usage": True},
    {"type": "allowed_tools",
     "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": _FUNCTION["parameters"]}},
    {"choice": ["a", "b"]},
)  # fmt: skip
MESSAGES = [{"role": "user", "content": "What does os.path.join do?"}]
JSON_TO = "host: localhost\r\ncontent-type: application/json\r\n"
HOSTS = (
    "localhost:8000", "127.0.0.1", "[::1]:80", "evil.example", "evil.example:80", "LOCALHOST.",
    "0x7f.1", "1234", "a" * 300, "[::1", "", " ", "a b", "a,b", "user@localhost", "localhost/evil",
    "localhost:x", "localhost:999999", "\xff", "*", "localhost\r\nhost: x",
)  # fmt: skip
ORIGINS = (
    "null", "http://localhost", "https://evil.example", "http://localhost.evil.example", "", "x",
    "\xff", "http://localhost, http://a",
)  # fmt: skip
CONTENT_TYPES = (
    "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "application/json; charset=utf-8", "", ";", "\xff", "application/jsonx",
    "application/json, text/plain", "application/json\r\ncontent-type: text/plain", "a" * 3000,
)  # fmt: skip
UPGRADES = (
    "h2c", "websocket", "foo", "h2c, websocket", "TLS/1.0, HTTP/1.1", "", "websocket\r\nupgrade: h2c",
    "websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
)  # fmt: skip
DEPTH = 20_000
HUGE_HEADER = 80 << 10


@dataclass(frozen=True, slots=True)
class Attempt:
    """One connection's next turn. ``pieces`` are written one after the other. They hold ``num_requests``
    requests. All are answered if the ending is ``keep``."""

    kind: str
    pieces: tuple[bytes, ...]
    num_requests: int = 1
    ending: Ending = "keep"


class RequestParts:
    """Draws parts of requests. ``key``: an API key that is good, where one is asked for."""

    def __init__(self, random: Random, key: str = "") -> None:
        self._random, self._key = random, key

    def over(self) -> Ending:
        return "half_close" if self._random.random() < 0.7 else "abort"

    def body(self) -> tuple[str, dict[str, Any]]:
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

    def value(self) -> Any:
        if self._random.random() < 0.7:
            return self._random.choice(SOME_VALUES)
        if self._random.random() < 0.5:
            return [self.value() for _ in range(self._random.randrange(4))]
        return {self._random.choice(FIELDS): self.value() for _ in range(self._random.randrange(3))}

    def authorization(self) -> str:
        return f"authorization: Bearer {self._key}\r\n" if self._key else ""

    def request(
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
        authorization = self.authorization() if key is None else ""
        head = f"{method} {path} HTTP/1.1\r\n{to}{authorization}{extra}content-length: {len(content)}\r\n\r\n"
        return head.encode("latin-1") + content
