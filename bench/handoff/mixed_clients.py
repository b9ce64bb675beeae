"""Clients of every kind, and what each of them saw of its request: for comparing with what is metered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, NamedTuple

import aiohttp

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"dark": {"type": "boolean"}},
    "required": ["dark"],
    "additionalProperties": False,
}
SHARED = (
    "The quick brown fox explains what os.path.join does, and why list comprehensions are read from left to "
    "right. " * 3
)
POLL_S = 0.2


class RequestFailed(Exception):
    """A request that should have been answered was not."""


class Seen(NamedTuple):
    """``id``: the response's, "" where none was seen. ``usage``: (prompt, cached, completion) tokens; None:
    the client left before."""

    kind: str
    tenant: str
    status: int
    id: str = ""
    usage: tuple[int, int, int] | None = None
    num_tokens: int = 0  # that certainly came, where the client left


class MixedClients:
    """``one`` after the other or at the same time; each is of a kind drawn at random."""

    def __init__(
        self, session: aiohttp.ClientSession, keys: dict[str, str], model: str, random: Random
    ) -> None:
        """``keys``: by tenant; "limited" is the one that is often refused."""
        self._session, self._keys, self._model, self._random = session, keys, model, random
        self._tenants = [tenant for tenant in keys if tenant != "limited"]
        kinds: dict[Callable[[], Awaitable[Seen]], float] = {
            self._whole: 30,
            self._streamed: 30,
            self._several: 8,
            self._held: 8,
            self._called: 4,
            self._scored: 3,
            self._leaves_stream: 6,
            self._leaves_before: 4,
            self._wrong_key: 3,
            self._nonsense: 2,
            self._over_limit: 2,
        }
        self._kinds, self._weights = list(kinds), list(kinds.values())

    async def one(self) -> Seen:
        """The next request, to its end. Raises RequestFailed."""
        kind = self._random.choices(self._kinds, self._weights)[0]
        try:
            return await kind()
        except (TimeoutError, aiohttp.ClientError) as error:
            raise RequestFailed(f"{kind.__name__.strip('_')}: {error!r}") from error

    async def batch(self, num_requests: int, timeout_s: float) -> list[Seen]:
        """Send ``num_requests`` requests in one batch, and return the contents of its files."""
        tenant = self._random.choice(self._tenants)
        lines = [
            {"custom_id": str(n), "method": "POST", "url": TEXT, "body": self._text()}
            for n in range(num_requests)
        ]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, lines)), filename="requests.jsonl")
        file = await self._json("POST", "/v1/files", tenant, data=form)
        wanted = {"input_file_id": file["id"], "endpoint": TEXT, "completion_window": "24h"}
        batch = await self._json("POST", "/v1/batches", tenant, json=wanted)
        async with asyncio.timeout(timeout_s):
            while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
                await asyncio.sleep(POLL_S)
                batch = await self._json("GET", f"/v1/batches/{batch['id']}", tenant)
        async with self._session.get(
            f"/v1/files/{batch['output_file_id']}/content", headers=self._headers(tenant)
        ) as response:
            answers = [json.loads(line)["response"] for line in (await response.text()).splitlines()]
        return [
            Seen("batch", tenant, a["status_code"], a["body"]["id"], _used(a["body"]["usage"]))
            for a in answers
        ]

    # --- those who stay to the end ---------------------------------------------------------------

    async def _whole(self) -> Seen:
        return await self._ask("whole", *self._body())

    async def _streamed(self) -> Seen:
        path, body = self._body()
        return await self._listen("streamed", path, {**body, **STREAMED})

    async def _several(self) -> Seen:
        path, body = self._body()
        count = self._random.randrange(2, 5)
        if path == TEXT and self._random.random() < 0.3:
            return await self._ask("best of", path, {**body, "best_of": count})
        if path == TEXT and self._random.random() < 0.5:
            body["prompt"] = [body["prompt"]] * 2 + ["another"]
        return await self._listen("several", path, {**body, "n": count, **STREAMED})

    async def _held(self) -> Seen:
        path, body = self._body()
        formats: list[dict[str, Any]] = [
            {"guided_choice": ["red", "green"]},
            {"guided_regex": "[ab]{3}"},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        ]
        return await self._ask("grammar", path, {**body, **self._random.choice(formats), "max_tokens": 20})

    async def _called(self) -> Seen:
        _, body = self._body(CHAT)
        tool = {**TOOL, "function": {**TOOL["function"], "strict": self._random.random() < 0.5}}
        more = {"tools": [tool], "tool_choice": self._random.choice(("auto", "required")), "max_tokens": 40}
        return await self._listen("tools", CHAT, {**body, **more, **STREAMED})

    async def _scored(self) -> Seen:
        body = {"prompt": SHARED[:200], "echo": True, "logprobs": 1, "max_tokens": self._random.randrange(3)}
        return await self._ask("scored", TEXT, body)

    # --- those who leave -------------------------------------------------------------------------

    async def _leaves_stream(self) -> Seen:
        path, body = self._body()
        leave_after = self._random.randrange(1, 8)
        return await self._listen(
            "leaves in mid-stream",
            path,
            {**body, "max_tokens": 60, "ignore_eos": True, "stream": True},
            leave_after,
        )

    async def _leaves_before(self) -> Seen:
        path, body = self._body()
        tenant = self._random.choice(self._tenants)
        try:
            async with asyncio.timeout(self._random.uniform(0.001, 0.05)):
                return await self._ask(
                    "leaves before", path, {**body, "max_tokens": 60, "ignore_eos": True}, tenant
                )
        except TimeoutError:
            return Seen("leaves before", tenant, 0)

    # --- those who are refused -------------------------------------------------------------------

    async def _wrong_key(self) -> Seen:
        path, body = self._body()
        headers = self._random.choice(({}, {"authorization": "Bearer sk-split-none"}))
        async with self._session.post(path, json=body, headers=headers) as response:
            return Seen("wrong key", "", response.status)

    async def _nonsense(self) -> Seen:
        path, body = self._body()
        wrong: list[dict[str, Any]] = [
            {"temperature": -1},
            {"max_tokens": 10**9},
            {"guided_regex": "("},
            {"model": "none"},
            {"n": "x"},
        ]
        return await self._ask("nonsense", path, {**body, **self._random.choice(wrong)})

    async def _over_limit(self) -> Seen:
        return await self._ask("over limits", *self._body(), tenant="limited")

    # --- parts -----------------------------------------------------------------------------------

    async def _ask(self, kind: str, path: str, body: dict[str, Any], tenant: str = "") -> Seen:
        tenant = tenant or self._random.choice(self._tenants)
        async with self._session.post(
            path, json={"model": self._model, **body}, headers=self._headers(tenant)
        ) as response:
            answer = await response.json()
            id = response.headers.get("x-request-id", "")
            return Seen(
                kind, tenant, response.status, id, _used(answer["usage"]) if response.status == 200 else None
            )

    async def _listen(self, kind: str, path: str, body: dict[str, Any], leave_after: int = 1 << 30) -> Seen:
        """``leave_after``: number of events with text after which the connection is closed."""
        tenant = self._random.choice(self._tenants)
        usage, num_tokens = None, 0
        async with self._session.post(
            path, json={"model": self._model, **body}, headers=self._headers(tenant)
        ) as response:
            id = response.headers.get("x-request-id", "")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RequestFailed(f"a stream ended with {event['error']}")
                usage = _used(event["usage"]) if event.get("usage") else usage
                num_tokens += any(
                    choice.get("text") or choice.get("delta", {}).get("content")
                    for choice in event["choices"]
                )
                if num_tokens >= leave_after:
                    response.close()
                    break
            return Seen(kind, tenant, response.status, id, usage, num_tokens)

    async def _json(self, method: str, path: str, tenant: str, **more: Any) -> dict[str, Any]:
        async with self._session.request(method, path, headers=self._headers(tenant), **more) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200:
                raise RequestFailed(f"{method} {path}: {answer}")
            return answer

    def _headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self._keys[tenant]}"}

    def _body(self, path: str = "") -> tuple[str, dict[str, Any]]:
        path = path or self._random.choice((CHAT, TEXT))
        if path == TEXT:
            return path, self._text()
        text = self._text()
        return path, {"messages": [{"role": "user", "content": text.pop("prompt")}], **text}

    def _text(self) -> dict[str, Any]:
        """Often with a beginning that others have had, too."""
        prompt = self._random.choice((SHARED, SHARED[:150], "")) + f"What is {self._random.randrange(50)}?"
        return {
            "prompt": prompt,
            "max_tokens": self._random.randrange(1, 10),
            "temperature": self._random.choice((0, 1)),
        }


def _used(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
