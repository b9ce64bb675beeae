"""The answers of Ollama's /api/chat and /api/generate: a line of JSON for each part, the last with counts."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from ..errors import ApiError
from .chat_stream import object_of

Event = dict[str, Any]
DONE_REASONS = {"length": "length", "timeout": "length"}
"""By the finish reason of a chat; stop for all others."""


class OllamaAnswer:
    """One answer. ``feed`` takes the chunks of the chat or the completion behind it."""

    def __init__(self, model: str, *, generates: bool) -> None:
        """``model``: the name that the client gave. ``generates``: in the form of /api/generate."""
        self._model, self._generates = model, generates
        self._text, self._thought = list[str](), list[str]()
        self._calls: list[dict[str, Any]] = []
        self._growing: dict[str, Any] | None = None  # a call whose arguments still come, as text
        self._logprobs: list[dict[str, Any]] = []
        self._usage: dict[str, Any] = {}
        self._reason = "stop"

    def feed(self, chunk: dict[str, Any]) -> Iterator[Event]:
        """Yield the parts of one chunk."""
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            delta = choice["delta"] if "delta" in choice else {"content": choice["text"]}
            calls = [done for call in delta.get("tool_calls", ()) if (done := self._call(call)) is not None]
            text, thought = delta.get("content") or "", delta.get("reasoning_content") or ""
            logprobs = [_logprob(entry) for entry in (choice.get("logprobs") or {}).get("content") or ()]
            self._text.append(text)
            self._thought.append(thought)
            self._logprobs += logprobs
            if text or thought or calls or logprobs:
                yield {**self._part(text, thought, calls, logprobs), "done": False}
            if (reason := choice["finish_reason"]) is not None:
                self._reason = DONE_REASONS.get(reason, "stop")

    def finish(self) -> Iterator[Event]:
        """Yield the last parts."""
        if (call := self._close_call()) is not None:
            yield {**self._part("", "", [call], []), "done": False}
        yield {**self._part("", "", [], []), **self._end()}

    def fail(self, error: ApiError) -> Iterator[Event]:
        """Yield the error that breaks it off."""
        yield {"error": error.message}

    def pause(self) -> Iterator[Event]:
        """Yield nothing: clients parse every line."""
        return iter(())

    def whole(self) -> Event:
        """See ``Answer``."""
        text, thought = "".join(self._text), "".join(self._thought)
        return {**self._part(text, thought, self._calls, self._logprobs), **self._end()}

    def loaded(self) -> Event:
        """Return the answer to a request without a prompt: the model is loaded."""
        return {**self._part("", "", [], []), "done": True, "done_reason": "load"}

    def _part(
        self, text: str, thought: str, calls: list[dict[str, Any]], logprobs: list[dict[str, Any]]
    ) -> Event:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        head = {"model": self._model, "created_at": now}
        more = {"logprobs": logprobs} if logprobs else {}
        thinking = {"thinking": thought} if thought else {}
        if self._generates:
            return {**head, "response": text, **thinking, **more}
        message = {
            "role": "assistant",
            "content": text,
            **thinking,
            **({"tool_calls": calls} if calls else {}),
        }
        return {**head, "message": message, **more}

    def _end(self) -> Event:
        usage = self._usage
        stages = {name: s for name, s in usage.get("splitserve", {}).items() if name.endswith("_s")}
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": _ns(sum(stages.values())),
            "load_duration": 0,  # the model is loaded before it is served
            "prompt_eval_count": usage.get("prompt_tokens", 0),
            "prompt_eval_duration": _ns(stages.get("prefill_s", 0.0)),
            "eval_count": usage.get("completion_tokens", 0),
            "eval_duration": _ns(stages.get("handoff_s", 0.0) + stages.get("decode_s", 0.0)),
        }

    def _call(self, part: dict[str, Any]) -> dict[str, Any] | None:
        """Take a part of a call. Return the call before it, if that is whole now: calls come in one piece."""
        done, function = None, part["function"]
        if "name" in function:
            done = self._close_call()
            self._growing = {"id": part["id"], "name": function["name"], "arguments": ""}
        if self._growing is not None:
            self._growing["arguments"] += function.get("arguments") or ""
        return done

    def _close_call(self) -> dict[str, Any] | None:
        if (call := self._growing) is None:
            return None
        self._growing = None
        arguments = object_of(call["arguments"])
        function = {"index": len(self._calls), "name": call["name"], "arguments": arguments}
        self._calls.append({"id": call["id"], "function": function})
        return self._calls[-1]


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a token's log probability without fields that Ollama does not have."""
    top = [{name: each[name] for name in ("token", "logprob", "bytes")} for each in entry["top_logprobs"]]
    return {**{name: entry[name] for name in ("token", "logprob", "bytes")}, "top_logprobs": top}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
