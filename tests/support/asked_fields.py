"""Asks a server with fields of other servers' APIs."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.text.served_model import ServedModel

USER = {"role": "user", "content": "Hi"}
CHAT = "/v1/chat/completions", {"messages": [USER], "temperature": 0}
TEXT = "/v1/completions", {"prompt": "Hi", "temperature": 0, "max_tokens": 500}
BOTH = pytest.mark.parametrize(("path", "body"), [CHAT, TEXT])


class Asked:
    """Posts bodies, and shows the prompt that the workers got."""

    def __init__(self, http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel) -> None:
        self._http, self._dispatcher, self._model = http, dispatcher, model

    async def answer(self, path: str, body: dict[str, Any], **more: Any) -> Any:
        response = await self._http.post(path, json={**body, **more})
        assert response.status_code == 200, response.text
        return response.json()

    async def refusal(self, path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
        response = await self._http.post(path, json={**body, **more})
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        return error

    async def chunks(self, path: str, body: dict[str, Any], **more: Any) -> list[Any]:
        response = await self._http.post(path, json={**body, **more, "stream": True})
        return [orjson.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]

    async def text(self, path: str, body: dict[str, Any], **more: Any) -> str:
        """Return the answer's text, which is the same in a stream."""
        choice = (await self.answer(path, body, **more))["choices"][0]
        whole: str = choice["message"]["content"] if "message" in choice else choice["text"]
        pieces = [c for chunk in await self.chunks(path, body, **more) for c in chunk["choices"]]
        texts = [c["delta"].get("content", "") if "delta" in c else c["text"] for c in pieces]
        assert "".join(texts) == whole
        return whole

    async def prompt(self, path: str, body: dict[str, Any], **more: Any) -> str:
        """The prompt as text, special tokens included."""
        await self.answer(path, body, **more)
        return self._model.tokenizer.decode(self.last.prompt_token_ids)

    @property
    def last(self) -> Any:
        return self._dispatcher.requests[-1]
