"""The answer of /v1/responses: the response as it grows, and its events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ..errors import ApiError
from .responses_body import ResponsesRequest
from .responses_items import Item, encrypted, new_id
from .responses_tools import chat_name, input_of

Event = dict[str, Any]
FINAL = {"response.completed", "response.incomplete", "response.failed"}
CUT_OFF = ("length", "timeout")
KIND_OF_DELTA = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
"""What the growing text of an item is called in its events."""


class ResponseAnswer:
    """One response. ``feed`` takes the chunks of the chat completion behind it."""

    def __init__(self, id: str, asked: ResponsesRequest, model_name: str) -> None:
        self.response: dict[str, Any] = {
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model_name,
            "output": [],
            "usage": None,
            **asked.echo(),
        }
        self._tools = {chat_name(tool): tool for tool in asked.functions}
        self._shows_thoughts = asked.shows_thoughts
        self._next_number = 0
        self._text: list[str] = []  # of the item that grows
        self._logprobs: list[dict[str, Any]] = []
        self._reason = "stop"

    def begin(self) -> Iterator[Event]:
        """Yield the events before the first chunk."""
        yield self._event("response.created", response=self._snapshot())
        yield self._event("response.in_progress", response=self._snapshot())

    def feed(self, chunk: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of one chunk."""
        self.response["model"] = chunk.get("model", self.response["model"])  # a route's is known now
        if not self._next_number:
            yield from self.begin()
        if chunk.get("usage"):
            self.response["usage"] = _usage(chunk["usage"])
        if tier := chunk.get("service_tier"):
            self.response["service_tier"] = tier
        for choice in chunk["choices"]:
            logprobs = (choice.get("logprobs") or {}).get("content") or []
            yield from self._feed_delta(choice["delta"], logprobs)
            self._reason = choice["finish_reason"] or self._reason

    def finish(self) -> Iterator[Event]:
        """Yield the last events."""
        if not self.response["output"]:
            yield from self._open({"type": "message", "role": "assistant", "content": []})
        cut_off = self._reason in CUT_OFF
        yield from self._close_item("incomplete" if cut_off else "completed")
        if cut_off:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._end("incomplete" if cut_off else "completed")

    def fail(self, error: ApiError) -> Iterator[Event]:
        """Yield the last events of a response that has failed."""
        if not self._next_number:
            yield from self.begin()
        yield from self._close_item("incomplete")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response["error"] = {"code": code, "message": error.message}
        yield self._end("failed")

    def pause(self) -> Iterator[Event]:
        """See ``Answer``: these events have nothing for it."""
        yield from ()

    def whole(self) -> dict[str, Any]:
        """See ``Answer``."""
        return self.response

    def _end(self, status: str) -> Event:
        self.response |= {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
        }
        return self._event(f"response.{status}", response=self._snapshot())

    def _feed_delta(self, delta: dict[str, Any], logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if thought := delta.get("reasoning_content"):
            yield from self._grow({"type": "reasoning", "summary": [], "content": []}, thought, [])
        if text := delta.get("content"):
            yield from self._grow({"type": "message", "role": "assistant", "content": []}, text, logprobs)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                yield from self._close_item("completed")
                yield from self._open(self._call(call["id"], function["name"]))
            if arguments := function.get("arguments"):
                if self._item["type"] == "custom_tool_call":
                    self._text.append(arguments)  # its input is read out of them when they are whole
                else:
                    yield self._delta(arguments, [])

    def _call(self, call_id: str, name: str) -> Item:
        """Return the item of a call, with the tool's name as its client gave it, within its namespace."""
        tool = self._tools.get(name, {"type": "function", "name": name})
        named: Item = {part: tool[part] for part in ("name", "namespace") if part in tool}
        if tool["type"] == "custom":
            return {"type": "custom_tool_call", "call_id": call_id, **named, "input": ""}
        return {"type": "function_call", "call_id": call_id, **named, "arguments": ""}

    def _grow(self, empty: Item, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """Add to the last item, or begin another one if it is of another type."""
        output = self.response["output"]
        if not output or output[-1]["type"] != empty["type"]:
            yield from self._close_item("completed")
            yield from self._open(empty)
        yield self._delta(text, logprobs)

    def _open(self, item: Item) -> Iterator[Event]:
        item = {"id": new_id(item["type"]), "status": "in_progress", **item}
        self.response["output"].append(item)
        yield self._event("response.output_item.added", output_index=self._last, item=_copy(item))
        if "content" in item:
            part = _part(item["type"], "", [])
            yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _delta(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        self._text.append(text)
        self._logprobs += logprobs
        kind = KIND_OF_DELTA[self._item["type"]]
        more: dict[str, Any] = {} if kind == "function_call_arguments" else {"content_index": 0}
        if kind == "output_text":
            more["logprobs"] = logprobs
        return self._of_item(f"response.{kind}.delta", delta=text, **more)

    def _close_item(self, status: str) -> Iterator[Event]:
        if not self.response["output"]:
            return
        item, text, logprobs = self._item, "".join(self._text), self._logprobs
        self._text, self._logprobs = [], []
        item["status"], kind = status, item["type"]
        done = f"response.{KIND_OF_DELTA[kind]}.done"
        if kind == "custom_tool_call":
            item["input"] = text = input_of(text)
            yield self._of_item("response.custom_tool_call_input.delta", delta=text)
            yield self._of_item(done, input=text)
        elif kind == "function_call":
            item["arguments"] = text
            yield self._of_item(done, name=item["name"], arguments=text)
        else:
            part = _part(kind, text, logprobs)
            item["content"] = [part]
            more = {"logprobs": logprobs} if kind == "message" else {}
            yield self._of_item(done, content_index=0, text=text, **more)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        if kind == "reasoning" and self._shows_thoughts:
            item["encrypted_content"] = encrypted(text)
        yield self._event("response.output_item.done", output_index=self._last, item=_copy(item))

    @property
    def _item(self) -> Item:
        item: Item = self.response["output"][-1]
        return item

    @property
    def _last(self) -> int:
        return len(self.response["output"]) - 1

    def _snapshot(self) -> dict[str, Any]:
        return {**self.response, "output": [_copy(item) for item in self.response["output"]]}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._item["id"], output_index=self._last, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._next_number = self._next_number, self._next_number + 1
        return {"type": kind, "sequence_number": number, **fields}


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _copy(item: Item) -> Item:
    return {**item, "content": list(item["content"])} if "content" in item else dict(item)


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
