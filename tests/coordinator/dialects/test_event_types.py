"""Each event of a streamed response has the form of OpenAI's published types."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from support.http_fakes import CALL, FakeDispatcher

from splitserve.coordinator.text.served_model import ServedModel

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FUNCTION = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {}}},
}
CUSTOM = {"type": "custom", "name": "weather"}


@pytest.mark.parametrize("tools", [[], [FUNCTION], [CUSTOM]], ids=["text", "function", "custom"])
@pytest.mark.parametrize("more", [{}, {"max_output_tokens": 2}, {"top_logprobs": 2}], ids=str)
async def test_events_are_openais(
    http: httpx.AsyncClient,
    dispatcher: FakeDispatcher,
    model: ServedModel,
    tools: list[dict[str, Any]],
    more: dict[str, Any],
) -> None:
    ids = model.tokenizer.fast.encode(f"So.{CALL}", add_special_tokens=False).ids
    dispatcher.script = lambda request: ids
    include = ["message.output_text.logprobs"] if "top_logprobs" in more else []
    body = {"input": "Hi", "stream": True, "tools": tools, "include": include, **more}
    answer = await http.post("/v1/responses", json=body)
    events = [orjson.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    for event in events:
        EVENTS.validate_python(event, strict=False)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == f"response.{'incomplete' if 'max_output_tokens' in more else 'completed'}"
    kinds = {event["type"] for event in events}
    assert ("response.output_text.delta" in kinds) or "max_output_tokens" in more
